//! What an answer means for its order: the table of statuses, its exceptions, and the header Retry-After.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use hyper::StatusCode;
use hyper::header::{HeaderMap, LOCATION, RETRY_AFTER};
use serde_json::Value;

use crate::handler::{Answer, Failure};
use crate::model::text::printable;

/// So much of the body of a failed answer is kept, in bytes.
const EXCERPT_BYTES: usize = 500;
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// What a status means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    Success,
    Retry,
    DeadLetter,
    Away,
}

/// What a 2xx with an error in its body means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Otherwise {
    #[default]
    DeadLetter,
    Retry,
}

/// How the answers of one route are read.
#[derive(Clone, Debug, Default)]
pub(super) struct Statuses {
    /// Exceptions to the table. A code wins over its class, by the first digit.
    pub codes: BTreeMap<u16, Meaning>,
    pub classes: BTreeMap<u16, Meaning>,
    /// A JSON pointer. A 2xx whose body has a value there is not a success.
    pub error: Option<String>,
    pub otherwise: Otherwise,
    /// The body of a 2xx is used.
    pub wants_reply: bool,
}

/// An answer, as far as it was read.
#[derive(Debug)]
pub(super) struct Received {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Body,
}

/// The body of an answer.
#[derive(Debug)]
pub(super) enum Body {
    Whole(Vec<u8>),
    /// It was cut off, because it was too long, too slow, or the connection was lost; and why.
    Part(Vec<u8>, &'static str),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Whole(bytes) | Self::Part(bytes, _) => bytes,
        }
    }
}

impl Meaning {
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "success" => Self::Success,
            "retry" => Self::Retry,
            "dead-letter" => Self::DeadLetter,
            "away" => Self::Away,
            _ => return None,
        })
    }
}

impl Statuses {
    pub fn meaning(&self, status: StatusCode) -> Meaning {
        let exception = self.codes.get(&status.as_u16()).or_else(|| self.classes.get(&(status.as_u16() / 100)));
        exception.copied().unwrap_or(match status.as_u16() {
            200..300 => Meaning::Success,
            400 | 413 | 415 | 422 | 501 => Meaning::DeadLetter,
            429 | 502 | 503 | 504 => Meaning::Away,
            _ => Meaning::Retry,
        })
    }

    /// Whether the body decides about the outcome, or is a part of it. Otherwise the head is the whole answer.
    pub fn needs_body(&self, status: StatusCode) -> bool {
        self.meaning(status) == Meaning::Success && status.is_success() && (self.wants_reply || self.error.is_some())
    }

    /// What the answer means. The first line of a failure says nothing that the endpoint wrote, and is all that may be logged.
    pub fn judge(&self, received: Received, now: SystemTime) -> Result<Answer, Failure> {
        let Received { status, headers, body } = received;
        match self.meaning(status) {
            Meaning::Success if self.needs_body(status) => self.success(status, body),
            Meaning::Success => Ok(Answer::default()),
            Meaning::DeadLetter => Err(Failure::Permanent(text(status, &headers, &body))),
            Meaning::Retry => Err(Failure::Retry(text(status, &headers, &body))),
            Meaning::Away => Err(Failure::Unanswered {
                cause: text(status, &headers, &body),
                retry_after: retry_after(&headers, now),
            }),
        }
    }

    fn success(&self, status: StatusCode, body: Body) -> Result<Answer, Failure> {
        let body = match body {
            Body::Whole(body) => body,
            Body::Part(_, why) => {
                return Err(Failure::Retry(format!("{}, but its body {why}", named(status))));
            }
        };
        if let Some(pointer) = &self.error
            && let Ok(answer) = serde_json::from_slice::<Value>(&body)
            && answer.pointer(pointer).is_some_and(|value| !value.is_null())
        {
            let text = with_excerpt(format!("{} with an error at {pointer}", named(status)), &body);
            return Err(match self.otherwise {
                Otherwise::DeadLetter => Failure::Permanent(text),
                Otherwise::Retry => Failure::Retry(text),
            });
        }
        Ok(if self.wants_reply { Answer { body: body.into() } } else { Answer::default() })
    }
}

fn named(status: StatusCode) -> Cow<'static, str> {
    match status.canonical_reason() {
        Some(reason) => format!("HTTP {} {reason}", status.as_u16()).into(),
        None => format!("HTTP {}", status.as_u16()).into(),
    }
}

/// The status and what to correct; then, on lines of their own, what the endpoint wrote.
fn text(status: StatusCode, headers: &HeaderMap, body: &Body) -> String {
    let advice = match status.as_u16() {
        300..=399 => ": redirects are never followed; correct the url",
        401 | 403 | 407 => ": the endpoint refuses the login; correct header_files or secret_file",
        404 | 405 | 410 => ": the endpoint does not take a POST there; correct the path of the url",
        408 => ": the endpoint waited too long for the request",
        409 | 425 => ": the endpoint must answer a key that it has completed with 2xx",
        413 => ": the order is too large for the endpoint",
        429 | 502 | 503 | 504 => "",
        500..600 => ": correct the endpoint",
        _ => "",
    };
    let mut text = format!("{}{advice}", named(status));
    if let Some(location) = headers.get(LOCATION).filter(|_| status.is_redirection()) {
        text = with_excerpt(text, &[b"Location: ", location.as_bytes()].concat());
    }
    with_excerpt(text, body.bytes())
}

fn with_excerpt(mut text: String, body: &[u8]) -> String {
    let excerpt = excerpt(body);
    if !excerpt.is_empty() {
        text.push('\n');
        text += &excerpt;
    }
    text
}

/// The beginning of a text that somebody else wrote, on one line.
fn excerpt(body: &[u8]) -> String {
    let body = &body[..body.len().min(EXCERPT_BYTES)];
    // The cut may go through a character.
    let text = String::from_utf8_lossy(body);
    let text = if body.len() == EXCERPT_BYTES { text.trim_end_matches(char::REPLACEMENT_CHARACTER) } else { &text };
    printable(text.trim()).into_owned()
}

/// The time that the endpoint asks for: seconds, or a date. `None` if there is none, or rubbish.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // Only a number that is far too large cannot be read.
        Duration::from_secs(value.parse().unwrap_or(u64::MAX))
    } else {
        httpdate::parse_http_date(value).ok()?.duration_since(now).unwrap_or_default()
    };
    Some(wait.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn received(status: u16, body: &str) -> Received {
        let status = StatusCode::from_u16(status).unwrap();
        Received { status, headers: HeaderMap::new(), body: Body::Whole(body.as_bytes().to_vec()) }
    }

    fn judge(statuses: &Statuses, status: u16, body: &str) -> Result<Answer, Failure> {
        statuses.judge(received(status, body), SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn each_status_means_what_the_table_says() {
        let meaning = |status| Statuses::default().meaning(StatusCode::from_u16(status).unwrap());
        for status in [200, 201, 202, 204, 299] {
            assert_eq!(meaning(status), Meaning::Success, "{status}");
        }
        for status in [400, 413, 415, 422, 501] {
            assert_eq!(meaning(status), Meaning::DeadLetter, "{status}");
        }
        for status in [429, 502, 503, 504] {
            assert_eq!(meaning(status), Meaning::Away, "{status}");
        }
        for status in [301, 302, 308, 401, 403, 404, 405, 407, 408, 409, 410, 418, 425, 500, 505, 599, 999] {
            assert_eq!(meaning(status), Meaning::Retry, "{status}");
        }
    }

    #[test]
    fn a_code_wins_over_a_class_and_both_over_the_table() {
        let statuses = Statuses {
            codes: [(404, Meaning::DeadLetter), (503, Meaning::Success)].into(),
            classes: [(5, Meaning::Retry), (4, Meaning::Away)].into(),
            ..Statuses::default()
        };
        let meaning = |status| statuses.meaning(StatusCode::from_u16(status).unwrap());
        assert_eq!(
            [404, 503, 501, 400].map(meaning),
            [Meaning::DeadLetter, Meaning::Success, Meaning::Retry, Meaning::Away]
        );
    }

    #[test]
    fn what_the_endpoint_wrote_stands_below_the_first_line() {
        let Err(Failure::Permanent(text)) = judge(&Statuses::default(), 422, "no such\nproduct\u{1b}[2J") else {
            panic!("422 is permanent")
        };
        assert_eq!(text, "HTTP 422 Unprocessable Entity\nno such\\nproduct\\u{1b}[2J");
        let mut redirect = received(302, "");
        redirect.headers.insert(LOCATION, HeaderValue::from_static("https://other/?token=1"));
        let Err(Failure::Retry(text)) = Statuses::default().judge(redirect, SystemTime::UNIX_EPOCH) else {
            panic!("302 is a retry")
        };
        assert_eq!(text.lines().nth(1), Some("Location: https://other/?token=1"));
        assert!(!text.lines().next().unwrap().contains("other"));
    }

    #[test]
    fn an_excerpt_has_five_hundred_bytes_and_no_half_character() {
        assert_eq!(excerpt("ü".repeat(400).as_bytes()), "ü".repeat(250));
        assert_eq!(excerpt(format!("x{}", "ü".repeat(400)).as_bytes()), format!("x{}", "ü".repeat(249)));
        assert_eq!(excerpt(b"\xff"), "\u{fffd}");
    }

    #[test]
    fn a_success_with_an_error_in_its_body_is_none() {
        let mut statuses = Statuses { error: Some("/error".to_owned()), ..Statuses::default() };
        for success in [r#"{"error": null}"#, r#"{"ok": true}"#, "", "accepted"] {
            assert!(judge(&statuses, 200, success).is_ok(), "{success}");
        }
        assert!(matches!(judge(&statuses, 200, r#"{"error": "sold out"}"#), Err(Failure::Permanent(_))));
        statuses.otherwise = Otherwise::Retry;
        assert!(matches!(judge(&statuses, 200, r#"{"error": false}"#), Err(Failure::Retry(_))));
    }

    #[test]
    fn the_body_is_an_answer_only_if_it_is_a_reply() {
        let mut statuses = Statuses::default();
        assert_eq!(judge(&statuses, 200, "done").unwrap().body, "");
        statuses.wants_reply = true;
        assert_eq!(judge(&statuses, 200, "done").unwrap().body, "done");
        let part = Received { body: Body::Part(b"do".to_vec(), "is too long"), ..received(200, "") };
        assert!(matches!(statuses.judge(part, SystemTime::UNIX_EPOCH), Err(Failure::Retry(_))));
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_within_its_bounds() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let seconds = |value: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_str(value).unwrap())]);
            retry_after(&headers, now).map(|wait| wait.as_secs())
        };
        let date = |wait: Duration| httpdate::fmt_http_date(now + wait);
        assert_eq!(seconds("7"), Some(7));
        assert_eq!(seconds("0"), Some(1));
        assert_eq!(seconds("1000000000"), Some(3600));
        assert_eq!(seconds("99999999999999999999999"), Some(3600));
        assert_eq!(seconds(&date(Duration::from_secs(90))), Some(90));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:37 GMT"), Some(1), "past");
        for rubbish in ["", "soon", "-5", "1.5", "7 s"] {
            assert_eq!(seconds(rubbish), None, "{rubbish}");
        }
    }
}
