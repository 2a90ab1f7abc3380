//! `[route.http]` as the handler file has it, and everything that is wrong with it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::StatusCode;
use hyper::header::{HeaderName, HeaderValue};
use serde::Deserialize;

use super::answer::{Meaning, Otherwise, Statuses};
use super::files::{self, HeaderFile, Paths};
use super::target::Target;

const TIMEOUT_DEFAULT: Duration = Duration::from_secs(15);
const TIMEOUT_MIN: Duration = Duration::from_millis(10);
/// A stop must have this much time after the last call, to commit its answer and to close the database.
const TIMEOUT_BELOW_SHUTDOWN: Duration = Duration::from_secs(2);
const CONCURRENCY_DEFAULT: i64 = 16;
const CONCURRENCY_MAX: i64 = 1000;
/// The request makes these headers itself. Names in lower case.
const OWN_HEADERS: [&str; 8] = [
    "connection",
    "content-length",
    "content-type",
    "idempotency-key",
    "order-attempt",
    "traceparent",
    "tracestate",
    "transfer-encoding",
];
const OWN_PREFIXES: [&str; 2] = ["nats-", "webhook-"];

/// The table `[route.http]`. The texts are checked by [`HttpRoute::check`], so that all problems are reported together.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpRoute {
    pub url: String,
    pub timeout: Option<String>,
    pub concurrency: Option<i64>,
    pub secret_file: Option<PathBuf>,
    pub headers: BTreeMap<String, String>,
    pub header_files: BTreeMap<String, PathBuf>,
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    pub reply: Option<String>,
    pub error: Option<String>,
    pub otherwise: Option<String>,
    pub status: BTreeMap<String, String>,
}

/// What the settings of a route depend on.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The folder of the handler file. Relative paths are relative to it.
    pub folder: &'a Path,
    /// A variable of the environment.
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    pub stream: &'a str,
    pub shutdown_timeout: Duration,
}

/// The settings, checked.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub target: Target,
    /// The URL as the file has it, with the names of the variables and not their values.
    pub url_as_written: String,
    pub timeout: Duration,
    pub concurrency: usize,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub paths: Paths,
    pub reply: Option<String>,
    pub statuses: Statuses,
}

impl HttpRoute {
    /// # Errors
    /// Every problem, one text each, that begins with the name of the setting.
    pub(super) fn check(&self, place: &Place<'_>) -> Result<Settings, Vec<String>> {
        let mut problems = Vec::new();
        let mut note = |problem: String| problems.push(problem);
        let target = self.target(place, &mut note);
        let timeout = self.timeout(place, &mut note);
        let concurrency = self.concurrency(&mut note);
        let headers = self.headers(&mut note);
        let is_tls = target.as_ref().is_none_or(Target::is_tls);
        let paths = self.paths(place.folder, is_tls, &mut note);
        let statuses = self.statuses(&mut note);
        if let Some(reply) = &self.reply
            && !is_subject(reply)
        {
            note(format!("reply: {reply:?} is not a subject without wildcards"));
        }
        files::check(&paths).into_iter().for_each(&mut note);
        match target {
            Some(target) if problems.is_empty() => Ok(Settings {
                target,
                url_as_written: self.url.clone(),
                timeout,
                concurrency,
                headers,
                paths,
                reply: self.reply.clone(),
                statuses,
            }),
            Some(_) | None => Err(problems),
        }
    }

    fn target(&self, place: &Place<'_>, note: &mut impl FnMut(String)) -> Option<Target> {
        let url = match filled_in(&self.url, place.environment) {
            Ok(url) => url,
            Err(problem) => {
                note(format!("url: {problem}"));
                return None;
            }
        };
        Target::parse(&url, place.folder).map_err(|problem| note(format!("url: {problem}"))).ok()
    }

    fn timeout(&self, place: &Place<'_>, note: &mut impl FnMut(String)) -> Duration {
        let timeout = match self.timeout.as_deref().map(humantime::parse_duration) {
            None => TIMEOUT_DEFAULT,
            Some(Ok(timeout)) => timeout,
            Some(Err(_)) => {
                note("timeout: must be a duration such as \"15s\"".to_owned());
                return TIMEOUT_DEFAULT;
            }
        };
        let (shutdown, text) = (place.shutdown_timeout, humantime::format_duration);
        if timeout < TIMEOUT_MIN || timeout + TIMEOUT_BELOW_SHUTDOWN > shutdown {
            note(format!(
                "timeout: {} is not between {} and {}; it must be at least {} less than shutdown.timeout ({}), so that a stop can \
                 finish the calls",
                text(timeout),
                text(TIMEOUT_MIN),
                text(shutdown.saturating_sub(TIMEOUT_BELOW_SHUTDOWN)),
                text(TIMEOUT_BELOW_SHUTDOWN),
                text(shutdown)
            ));
        }
        timeout
    }

    fn concurrency(&self, note: &mut impl FnMut(String)) -> usize {
        let concurrency = self.concurrency.unwrap_or(CONCURRENCY_DEFAULT);
        if !(1..=CONCURRENCY_MAX).contains(&concurrency) {
            note(format!("concurrency: {concurrency} is not between 1 and {CONCURRENCY_MAX}"));
        }
        usize::try_from(concurrency).unwrap_or(1)
    }

    fn headers(&self, note: &mut impl FnMut(String)) -> Vec<(HeaderName, HeaderValue)> {
        let mut headers = Vec::with_capacity(self.headers.len());
        for (name, value) in &self.headers {
            match (header_name(name), HeaderValue::from_str(value)) {
                (Ok(name), Ok(value)) => headers.push((name, value)),
                (Err(problem), _) => note(format!("headers: {problem}")),
                (Ok(_), Err(_)) => {
                    note(format!("headers: the value of {name} has characters that a header cannot have"))
                }
            }
            if self.header_files.keys().any(|other| other.eq_ignore_ascii_case(name)) {
                note(format!("headers: {name} is also in header_files"));
            }
        }
        headers
    }

    fn paths(&self, folder: &Path, is_tls: bool, note: &mut impl FnMut(String)) -> Paths {
        let at = |path: &Option<PathBuf>| path.as_ref().map(|path| folder.join(path));
        let mut header_files = Vec::with_capacity(self.header_files.len());
        for (name, path) in &self.header_files {
            match header_name(name) {
                Ok(name) => header_files.push(HeaderFile { name, path: folder.join(path) }),
                Err(problem) => note(format!("header_files: {problem}")),
            }
        }
        for (setting, path) in
            [("ca_file", &self.ca_file), ("cert_file", &self.cert_file), ("key_file", &self.key_file)]
        {
            if path.is_some() && !is_tls {
                note(format!("{setting}: only a url with https:// uses it"));
            }
        }
        if self.cert_file.is_some() != self.key_file.is_some() {
            note("cert_file: cert_file and key_file must both be set, or neither".to_owned());
        }
        Paths {
            secret: at(&self.secret_file),
            headers: header_files,
            ca: at(&self.ca_file),
            cert: at(&self.cert_file),
            key: at(&self.key_file),
            is_tls,
        }
    }

    fn statuses(&self, note: &mut impl FnMut(String)) -> Statuses {
        let mut statuses =
            Statuses { error: self.error.clone(), wants_reply: self.reply.is_some(), ..Statuses::default() };
        if let Some(pointer) = self.error.as_deref().filter(|pointer| !pointer.starts_with('/')) {
            note(format!("error: {pointer:?} is not a JSON pointer such as \"/error\""));
        }
        statuses.otherwise = match self.otherwise.as_deref() {
            None | Some("dead-letter") => Otherwise::DeadLetter,
            Some("retry") => Otherwise::Retry,
            Some(other) => {
                note(format!("otherwise: {other:?} is not \"dead-letter\" or \"retry\""));
                Otherwise::DeadLetter
            }
        };
        if self.otherwise.is_some() && self.error.is_none() {
            note("otherwise: it only counts together with `error`".to_owned());
        }
        for (status, meaning) in &self.status {
            let Some(meaning) = Meaning::parse(meaning) else {
                note(format!(
                    "status: {meaning:?} for {status:?} is not \"success\", \"retry\", \"dead-letter\" or \"away\""
                ));
                continue;
            };
            match (class(status), status.parse().ok().and_then(|code| StatusCode::from_u16(code).ok())) {
                (Some(class), _) => drop(statuses.classes.insert(class, meaning)),
                (None, Some(code)) if (200..600).contains(&code.as_u16()) => {
                    statuses.codes.insert(code.as_u16(), meaning);
                }
                (None, Some(_) | None) => {
                    note(format!("status: {status:?} is not a code such as \"404\" or a class such as \"5xx\""))
                }
            }
        }
        statuses
    }
}

/// `5` for `5xx`.
fn class(status: &str) -> Option<u16> {
    let digit = status.strip_suffix("xx")?.parse().ok()?;
    (2..=5).contains(&digit).then_some(digit)
}

fn header_name(name: &str) -> Result<HeaderName, String> {
    let lower = name.to_ascii_lowercase();
    if OWN_HEADERS.contains(&lower.as_str()) || OWN_PREFIXES.iter().any(|prefix| lower.starts_with(prefix)) {
        return Err(format!("{name} is a header that each request has already; remove it"));
    }
    lower.parse().map_err(|_| format!("{name:?} is not the name of a header"))
}

fn is_subject(text: &str) -> bool {
    let is_token = |token: &str| {
        !token.is_empty() && !token.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '*' | '>'))
    };
    text.split('.').all(is_token)
}

/// The text with the values of its variables, `${NAME}`.
fn filled_in(text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, after) = after.split_once('}').ok_or("`${` has no `}`")?;
        let value = environment(name)
            .ok_or_else(|| format!("the environment has no variable {name}, which `${{{name}}}` needs"))?;
        filled += before;
        filled += &value;
        rest = after;
    }
    Ok(filled + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(toml: &str) -> Vec<String> {
        let route: HttpRoute = serde_json::from_str(toml).unwrap();
        let environment = |name: &str| (name == "SHOP_HOST").then(|| "shop.example".to_owned());
        let place = Place {
            folder: Path::new("/nowhere"),
            environment: &environment,
            stream: "ORDERS",
            shutdown_timeout: Duration::from_secs(25),
        };
        route.check(&place).map(|_| ()).err().unwrap_or_default()
    }

    #[test]
    fn the_example_of_the_design_is_right_apart_from_its_files() {
        let route = r#"{"url": "https://${SHOP_HOST}/orders", "timeout": "15s", "concurrency": 16,
            "headers": {"X-Shop": "eu"}, "reply": "SHOP.answers", "error": "/error", "otherwise": "retry",
            "status": {"404": "dead-letter", "5xx": "retry"}}"#;
        assert_eq!(problems(route), Vec::<String>::new());
    }

    #[test]
    fn all_problems_are_reported_together() {
        let route = r#"{"url": "https://${SHOP}/orders", "timeout": "24s", "concurrency": 0, "secret_file": "webhook.secret",
            "headers": {"Nats-Subject": "x", "a b": "x", "X-Line": "a\nb", "x-two": "1"}, "header_files": {"X-Two": "two"},
            "cert_file": "cert.pem", "reply": "SHOP.*", "error": "error", "otherwise": "never",
            "status": {"404": "ignore", "9xx": "retry", "20": "retry"}}"#;
        let problems = problems(route);
        for setting in
            ["url", "timeout", "concurrency", "secret_file", "header_files", "cert_file", "reply", "error", "otherwise"]
        {
            let of_it = |problem: &&String| problem.starts_with(setting);
            assert!(problems.iter().any(|problem| of_it(&problem)), "{setting}: {problems:#?}");
        }
        assert_eq!(problems.iter().filter(|problem| problem.starts_with("headers: ")).count(), 4, "{problems:#?}");
        assert_eq!(problems.iter().filter(|problem| problem.starts_with("status: ")).count(), 3, "{problems:#?}");
        assert!(!problems.iter().any(|problem| problem.contains("shop.example")));
    }

    #[test]
    fn settings_without_effect_are_problems() {
        assert_eq!(problems(r#"{"url": "http://shop", "ca_file": "ca.pem", "otherwise": "retry"}"#).len(), 2);
        assert_eq!(problems(r#"{"url": "http://shop", "timeout": "soon"}"#).len(), 1);
        assert_eq!(problems("{}").len(), 1, "a url is needed");
    }
}
