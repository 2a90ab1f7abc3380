//! Named values of an order: where each comes from, of which type it is, and what is wrong if an order does not have it.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::value::RawValue;

use super::file::section::Section;
use crate::model::delivery::{Delivery, headers_json};
use crate::model::pointer::{Pointers, is_pointer};

/// What every route has, with no declaration.
const BUILT_IN: [(&str, Source); 8] = [
    ("id", Source::Id),
    ("subject", Source::WholeSubject),
    ("stream_seq", Source::StreamSeq),
    ("published_at", Source::PublishedAt),
    ("now", Source::Now),
    ("headers", Source::Headers),
    ("payload", Source::Payload),
    ("payload_bytes", Source::PayloadBytes),
];
const TYPES: [(&str, ParamType); 6] = [
    ("text", ParamType::Text),
    ("integer", ParamType::Integer),
    ("real", ParamType::Real),
    ("bool", ParamType::Bool),
    ("json", ParamType::Json),
    ("blob", ParamType::Blob),
];

/// A value that a statement is given.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Integer(i64),
    Real(f64),
    Text(Arc<str>),
    Blob(Arc<[u8]>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParamType {
    Text,
    Integer,
    Real,
    Bool,
    Json,
    Blob,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Id,
    WholeSubject,
    StreamSeq,
    PublishedAt,
    Now,
    Headers,
    Payload,
    PayloadBytes,
    /// A pointer into the payload, and its index in [`Pointers`].
    Json {
        pointer: String,
        index: usize,
    },
    /// The name of a header, as written.
    Header(String),
    /// A token of the subject, from 1.
    Token(usize),
}

/// One named value of a route.
#[derive(Clone, Debug)]
pub struct Param {
    pub name: String,
    source: Source,
    kind: ParamType,
    /// What an order without the value gets; without this, the order is a dead letter.
    missing: Option<Value>,
}

/// The named values of a route.
#[derive(Clone, Debug, Default)]
pub struct Params {
    pub params: Vec<Param>,
    pointers: Pointers,
}

impl Params {
    /// Reads `[route.params]`. The built-in parameters follow the declared ones.
    pub fn read(route: &Section<'_>) -> Self {
        let mut params = Self::default();
        if let Some(section) = route.section("params") {
            for name in section.keys() {
                let Some(declared) = section.section(name) else { continue };
                if BUILT_IN.iter().any(|(built_in, _)| *built_in == name) {
                    declared.note("the name is the one of a built-in parameter; choose another name");
                }
                if let Some(param) = params.declared(name, &declared) {
                    params.params.push(param);
                }
            }
        }
        let built_in = BUILT_IN.map(|(name, source)| Param {
            name: name.to_owned(),
            source,
            kind: ParamType::Text,
            missing: None,
        });
        params.params.extend(built_in);
        params
    }

    /// How many of the parameters the file declares.
    pub fn declared_count(&self) -> usize {
        self.params.len() - BUILT_IN.len()
    }

    fn declared(&mut self, name: &str, section: &Section<'_>) -> Option<Param> {
        section.known(&["json", "header", "subject", "type", "optional", "default"]);
        let source = Source::read(section, &mut self.pointers);
        let kind = match section.text("type") {
            Some(text) => {
                let kind = TYPES.iter().find(|(name, _)| *name == text).map(|(_, kind)| *kind);
                if kind.is_none() {
                    section.note(format!("type {text:?} is not one of text, integer, real, bool, json, blob"));
                }
                kind?
            }
            None if matches!(source, Some(Source::Json { .. })) => {
                if !section.has("type") {
                    section.note("a value from `json` needs a type: text, integer, real, bool, json or blob");
                }
                return None;
            }
            None => ParamType::Text,
        };
        let missing = match (section.flag("optional"), section.value("default")) {
            (true, Some(_)) => {
                section.note("it has `optional` and `default`; remove one of them");
                None
            }
            (true, None) => Some(Value::Null),
            (false, None) => None,
            (false, Some(default)) => match kind.default(default) {
                Ok(value) => Some(value),
                Err(problem) => {
                    section.note(format!("default {problem}"));
                    None
                }
            },
        };
        Some(Param { name: name.to_owned(), source: source?, kind, missing })
    }

    /// The values of one order, in the order of `wanted`, which are indices of [`Params::params`].
    ///
    /// # Errors
    /// What the order does not have. The text names the place and the type that was found, but no value.
    pub fn values(&self, delivery: &Delivery, now_ns: i64, wanted: &[usize]) -> Result<Vec<Value>, String> {
        let needs_json = wanted.iter().any(|index| matches!(self.params[*index].source, Source::Json { .. }));
        let found = if needs_json { self.found(delivery)? } else { Vec::new() };
        wanted.iter().map(|index| self.params[*index].value(delivery, &found, now_ns)).collect()
    }

    fn found<'d>(&self, delivery: &'d Delivery) -> Result<Vec<Option<&'d RawValue>>, String> {
        self.pointers.find(&delivery.raw.payload).map_err(|error| {
            let names: Vec<&str> = self.params.iter().filter_map(|param| param.source.pointer()).collect();
            format!("the payload is not valid JSON ({error}), and the route needs {}", names.join(", "))
        })
    }
}

impl Param {
    fn value(&self, delivery: &Delivery, found: &[Option<&RawValue>], now_ns: i64) -> Result<Value, String> {
        let raw = &delivery.raw;
        let text = |text: &str| Ok(Value::Text(text.into()));
        match &self.source {
            Source::Id => Ok(Value::Text(delivery.id.clone())),
            Source::WholeSubject => Ok(Value::Text(raw.subject.clone())),
            Source::StreamSeq => Ok(Value::Integer(i64::try_from(raw.position.stream_seq).unwrap_or(i64::MAX))),
            Source::PublishedAt => Ok(Value::Integer(raw.position.published_ns)),
            Source::Now => Ok(Value::Integer(now_ns)),
            Source::Headers => text(&headers_json(&raw.headers)),
            Source::Payload => str::from_utf8(&raw.payload)
                .map_err(|_| {
                    "the payload is not UTF-8, and a statement uses :payload; :payload_bytes takes any payload"
                        .to_owned()
                })
                .and_then(text),
            Source::PayloadBytes => Ok(Value::Blob(raw.payload.as_ref().into())),
            Source::Json { pointer, index } => match found[*index] {
                None => self.without(|| format!("the payload has no value at {pointer}")),
                Some(value) if value.get() == "null" => self.without(|| format!("the value at {pointer} is null")),
                Some(value) => {
                    self.kind.of_json(value.get()).map_err(|why| self.wrong(&format!("the value at {pointer}"), &why))
                }
            },
            Source::Header(name) => match raw.headers.iter().find(|(header, _)| header == name) {
                None => self.without(|| format!("the message has no header {name}")),
                Some((_, value)) => {
                    self.kind.of_text(value).map_err(|why| self.wrong(&format!("the header {name}"), &why))
                }
            },
            Source::Token(number) => match raw.subject.split('.').nth(number - 1) {
                None => self.without(|| format!("the subject has no token {number}")),
                Some(token) => {
                    self.kind.of_text(token).map_err(|why| self.wrong(&format!("token {number} of the subject"), &why))
                }
            },
        }
    }

    fn without(&self, why: impl FnOnce() -> String) -> Result<Value, String> {
        self.missing.clone().ok_or_else(|| format!("{}; parameter :{} needs it", why(), self.name))
    }

    fn wrong(&self, place: &str, why: &str) -> String {
        format!("{place} {why}, and parameter :{} has type {}", self.name, self.kind.name())
    }
}

impl Source {
    /// Reads the one of `json`, `header` and `subject` that a table has.
    pub fn read(section: &Section<'_>, pointers: &mut Pointers) -> Option<Self> {
        let named: Vec<&str> = ["json", "header", "subject"].into_iter().filter(|key| section.has(key)).collect();
        let [key] = named[..] else {
            section.note("it needs exactly one of json = \"/pointer\", header = \"Name\", subject = NUMBER");
            return None;
        };
        match key {
            "json" => {
                let pointer = section.text(key)?;
                if !is_pointer(pointer) {
                    section.note(format!("json: {pointer:?} is not a JSON pointer such as \"/order/id\""));
                    return None;
                }
                Some(Self::Json { pointer: pointer.to_owned(), index: pointers.add(pointer) })
            }
            "header" => section.text(key).map(|name| Self::Header(name.to_owned())),
            _ => match section.whole_number(key).map(usize::try_from)? {
                Ok(number @ 1..) => Some(Self::Token(number)),
                Ok(0) | Err(_) => {
                    section.note("subject: the first token of the subject has number 1");
                    None
                }
            },
        }
    }

    fn pointer(&self) -> Option<&str> {
        if let Self::Json { pointer, .. } = self { Some(pointer) } else { None }
    }

    /// The value as text, for comparisons; `None` if the order does not have it.
    pub fn plain_text(&self, delivery: &Delivery, found: Option<&[Option<&RawValue>]>) -> Option<String> {
        match self {
            Self::Json { index, .. } => match found?.get(*index).copied().flatten()?.get() {
                "null" => None,
                text if text.starts_with('"') => serde_json::from_str(text).ok(),
                text => Some(text.to_owned()),
            },
            Self::Header(name) => {
                delivery.raw.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.clone())
            }
            Self::Token(number) => delivery.raw.subject.split('.').nth(number - 1).map(ToOwned::to_owned),
            Self::Id | Self::WholeSubject | Self::StreamSeq | Self::PublishedAt | Self::Now => None,
            Self::Headers | Self::Payload | Self::PayloadBytes => None,
        }
    }
}

impl ParamType {
    fn name(self) -> &'static str {
        TYPES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    fn of_json(self, raw: &str) -> Result<Value, String> {
        let is_string = raw.starts_with('"');
        let is_number = raw.starts_with(|c: char| c == '-' || c.is_ascii_digit());
        match self {
            Self::Json => Ok(Value::Text(raw.into())),
            Self::Text | Self::Blob if is_string => {
                let text: String =
                    serde_json::from_str(raw).map_err(|error| format!("is not a valid text ({error})"))?;
                self.of_text(&text)
            }
            // As written: a decimal keeps its digits.
            Self::Text if is_number => Ok(Value::Text(raw.into())),
            Self::Integer | Self::Real if is_number => self.of_text(raw),
            Self::Bool if matches!(raw, "true" | "false") => self.of_text(raw),
            Self::Text | Self::Integer | Self::Real | Self::Bool | Self::Blob => Err(format!("is {}", json_kind(raw))),
        }
    }

    fn of_text(self, text: &str) -> Result<Value, String> {
        match self {
            Self::Text => Ok(Value::Text(text.into())),
            Self::Integer => integer(text).map(Value::Integer),
            Self::Real => match text.parse::<f64>() {
                Ok(number) if number.is_finite() => Ok(Value::Real(number)),
                Ok(_) => Err("is a number beyond 64 bits (type = \"text\" keeps every digit)".to_owned()),
                Err(_) => Err("is not a number".to_owned()),
            },
            Self::Bool => match text {
                "true" => Ok(Value::Integer(1)),
                "false" => Ok(Value::Integer(0)),
                _ => Err("is not true or false".to_owned()),
            },
            Self::Json => match serde_json::from_str::<&RawValue>(text) {
                Ok(_) => Ok(Value::Text(text.into())),
                Err(_) => Err("is not valid JSON".to_owned()),
            },
            Self::Blob => {
                STANDARD.decode(text).map(|bytes| Value::Blob(bytes.into())).map_err(|_| "is not base64".to_owned())
            }
        }
    }

    /// The value of `default`, which the file may write as the TOML type that is meant.
    fn default(self, default: &toml::Value) -> Result<Value, String> {
        match default {
            toml::Value::String(text) => self.of_text(text).map_err(|why| format!("{text:?} {why}")),
            toml::Value::Integer(number) => self
                .of_json(&number.to_string())
                .map_err(|why| format!("{number} {why}, and the type is {}", self.name())),
            toml::Value::Float(number) if self == Self::Real => Ok(Value::Real(*number)),
            toml::Value::Boolean(value) if matches!(self, Self::Bool | Self::Json) => self.of_text(&value.to_string()),
            toml::Value::Float(_)
            | toml::Value::Boolean(_)
            | toml::Value::Datetime(_)
            | toml::Value::Array(_)
            | toml::Value::Table(_) => Err(format!("must be a value of type {}", self.name())),
        }
    }
}

/// 64 bits; `1.0` is an integer, and `1.5`, `1e3` and `1.` are not.
fn integer(text: &str) -> Result<i64, String> {
    let whole = match text.split_once('.') {
        Some((whole, zeros)) if !zeros.is_empty() && zeros.bytes().all(|digit| digit == b'0') => whole,
        Some(_) => return Err("is not a whole number".to_owned()),
        None => text,
    };
    let digits = whole.strip_prefix('-').unwrap_or(whole);
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err("is not a whole number".to_owned());
    }
    whole.parse().map_err(|_| "is a number beyond 64 bits (type = \"text\" keeps every digit)".to_owned())
}

fn json_kind(raw: &str) -> &'static str {
    match raw.as_bytes().first() {
        Some(b'"') => "a text",
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b't' | b'f') => "true or false",
        _ => "a number",
    }
}
