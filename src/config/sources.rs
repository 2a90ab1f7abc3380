//! What each source of settings holds: only known keys, each with its origin.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use ::config::{Environment, File, FileFormat, Map, Source, Value, ValueKind};

use super::{ENV_PREFIX, SETTINGS};

/// What one source sets, with the source as the origin of each value. Only known keys get in: whatever else is found is
/// reported where it is, before a merge could hide it (`nats = 5` would remove the whole section).
#[derive(Clone, Debug, Default)]
pub struct Layer(Map<String, Value>);

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ::config::ConfigError> {
        Ok(self.0.clone())
    }
}

/// The file's layer, empty if there is no file; `None` if it cannot be read.
///
/// The file is not read through the `config` crate, which would try other extensions for a name that does not exist.
pub fn file_layer(file: Option<&Path>, system_file: &Path, problems: &mut Vec<String>) -> Option<Layer> {
    let path = file.unwrap_or(system_file);
    match std::fs::read_to_string(path) {
        Ok(text) => toml_layer(&text, &format!("file {}", path.display()), problems),
        Err(error) if file.is_none() && error.kind() == io::ErrorKind::NotFound => Some(Layer::default()),
        Err(error) => {
            problems.push(format!("file {}: cannot be read: {error}", path.display()));
            None
        }
    }
}

pub fn toml_layer(text: &str, origin: &str, problems: &mut Vec<String>) -> Option<Layer> {
    let table = match File::from_str(text, FileFormat::Toml).collect() {
        Ok(table) => table,
        Err(error) => {
            problems.push(format!("{origin}: is not TOML: {}", without_excerpt(&error.to_string())));
            return None;
        }
    };
    let mut layer = Layer::default();
    for (segment, value) in sorted(table) {
        layer.place(&quoted(&segment), value, origin, problems);
    }
    Some(layer)
}

/// The first and last line of the parser's message: the place and the reason. Between them it shows the line of the
/// file, which may hold a password.
fn without_excerpt(message: &str) -> String {
    let mut lines = message.lines().filter(|line| !line.trim().is_empty());
    match (lines.next(), lines.next_back()) {
        (Some(place), Some(reason)) => format!("{place}: {reason}"),
        (only, _) => only.unwrap_or_default().to_owned(),
    }
}

pub fn env_layer(env: impl IntoIterator<Item = (OsString, OsString)>, problems: &mut Vec<String>) -> Layer {
    let mut variables = Map::new();
    for (name, value) in env {
        let shown_name = name.to_string_lossy();
        if let Some(wanted) = with_one_underscore(&shown_name) {
            let what = format!("unknown key; did you mean {wanted}? Two underscores stand between all parts");
            problems.push(format!("environment {}: {what}", shown_name.escape_debug()));
            continue;
        }
        // In any case, since a setting must not be ignored because its name is in small letters.
        if !shown_name.get(..ENV_PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(ENV_PREFIX)) {
            continue;
        }
        if !shown_name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_') {
            let what = "is not the name of a setting: these are capital letters, digits and underscores";
            problems.push(format!("environment {}: {what}", shown_name.escape_debug()));
        } else if value.to_str().is_some_and(is_quoted) {
            let what =
                "(value not shown) stands in quotation marks, which belong to the value here; write it without them";
            problems.push(format!("environment {shown_name}: {what}"));
        } else if let Some(value) = value.to_str() {
            variables.insert(shown_name.into_owned(), value.to_owned());
        } else {
            problems.push(format!("environment {shown_name}: (value not shown) is not Unicode text"));
        }
    }
    let source =
        Environment::with_prefix("ORDER_PROCESSOR").prefix_separator("__").separator("__").source(Some(variables));
    let values =
        source.collect().expect("collecting fails on values that are not Unicode, and these are left out above");
    let mut layer = Layer::default();
    for (key, value) in sorted(values) {
        layer.place(&key, value, &format!("environment {}", variable(&key)), problems);
    }
    layer
}

/// Docker's env files and Kubernetes manifests keep the quotation marks that a shell removes. No setting has such a value.
fn is_quoted(value: &str) -> bool {
    ['"', '\''].iter().any(|mark| value.len() > 1 && value.starts_with(*mark) && value.ends_with(*mark))
}

/// The variable that `ORDER_PROCESSOR_BATCH__MAX_BYTES` or `ORDER_PROCESSOR_NATS_URL` was to be. `None` for what deployments put under
/// the same prefix, such as the `ORDER_PROCESSOR_PORT_9464_TCP` of a Kubernetes service: that is not a setting and has no two
/// underscores after one of our sections.
fn with_one_underscore(name: &str) -> Option<String> {
    let prefix = ENV_PREFIX.len() - 1;
    let (start, rest) = (name.get(..prefix)?, name.get(prefix..)?);
    if !start.eq_ignore_ascii_case(&ENV_PREFIX[..prefix]) || rest.starts_with('_') {
        return None;
    }
    if let Some(setting) = SETTINGS.iter().find(|setting| setting.key.replace('.', "_").eq_ignore_ascii_case(rest)) {
        return Some(variable(setting.key));
    }
    let (section, _) = rest.split_once("__")?;
    sections().find(|known| known.eq_ignore_ascii_case(section))?;
    let key = rest.replace("__", ".").to_lowercase();
    Some(variable(nearest(&key, SETTINGS.iter().map(|setting| setting.key)).1))
}

/// The variable that sets `key`. Names in capitals only, so there is exactly one.
pub fn variable(key: &str) -> String {
    format!("{ENV_PREFIX}{}", key.replace('.', "__").to_ascii_uppercase())
}

/// In a fixed order, so that the same mistakes give the same message.
fn sorted(table: Map<String, Value>) -> Vec<(String, Value)> {
    let mut entries: Vec<_> = table.into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}

/// One part of a TOML key as TOML would spell it: `"nats.url" = …` is not the key `nats.url`.
fn quoted(segment: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !segment.is_empty() && segment.chars().all(bare) { segment.to_owned() } else { format!("{segment:?}") }
}

impl Layer {
    /// Takes `value` in if `key` is known, and goes into tables.
    fn place(&mut self, key: &str, value: Value, origin: &str, problems: &mut Vec<String>) {
        let is_setting = SETTINGS.iter().any(|setting| setting.key == key);
        let is_section = sections().any(|section| section == key);
        match value.kind {
            ValueKind::Table(table) if is_section => {
                for (segment, value) in sorted(table) {
                    self.place(&format!("{key}.{}", quoted(&segment)), value, origin, problems);
                }
            }
            ValueKind::Table(_) if is_setting => {
                problems.push(format!("{key} ({origin}): is a table where one value is wanted"));
            }
            ValueKind::Table(_) => problems.push(unknown_section(key, origin)),
            kind if is_setting => {
                self.0.insert(key.to_owned(), Value::new(Some(&origin.to_owned()), kind));
            }
            _ if is_section => {
                let example = SETTINGS.iter().find(|setting| setting.key.starts_with(&format!("{key}.")));
                let example = example.map_or("", |setting| setting.key);
                problems.push(format!("{key} ({origin}): is a section, not a value: it holds keys such as {example}"));
            }
            _ => problems.push(unknown_key(key, origin)),
        }
    }
}

/// Every table that holds keys: `nats`, `nats.tls`, ….
fn sections() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().flat_map(|setting| setting.key.match_indices('.').map(|(dot, _)| &setting.key[..dot]))
}

/// Someone who does not know the sections looks for what the handler does here, so the text says where that is.
fn unknown_section(key: &str, origin: &str) -> String {
    let (distance, nearest) = nearest(key, sections());
    let slip = if distance <= key.chars().count() / 2 { format!("did you mean {nearest}? ") } else { String::new() };
    let mut known: Vec<&str> = Vec::new();
    for section in sections() {
        if !known.contains(&section) {
            known.push(section);
        }
    }
    format!(
        "{key} ({origin}): unknown section; {slip}the sections are {}. A handler is Rust code: see docs/handlers.md",
        known.join(", ")
    )
}

/// The value of an unknown key is never shown: it may be `nats.password`.
fn unknown_key(key: &str, origin: &str) -> String {
    let (distance, nearest) = nearest(key, SETTINGS.iter().map(|setting| setting.key));
    let nearest = match origin.strip_prefix("environment") {
        Some(_) => format!("{nearest} ({})", variable(nearest)),
        None => nearest.to_owned(),
    };
    let hint = match distance <= key.chars().count() / 2 {
        true => format!("did you mean {nearest}?"),
        // More than half of it differs, so a typing error is unlikely.
        false => format!("the most similar key is {nearest}"),
    };
    format!("{key} ({origin}): unknown key; {hint}")
}

fn nearest(key: &str, candidates: impl Iterator<Item = &'static str>) -> (usize, &'static str) {
    candidates
        .map(|candidate| (strsim::levenshtein(&key.to_lowercase(), candidate), candidate))
        .min()
        .expect("there are settings, so there are candidates")
}
