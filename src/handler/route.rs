//! One route of the handler file: which orders it is for, and what it does with them.

use super::file::section::{Section, meant};
use super::http::{Endpoint, HttpRoute, Place};
use super::params::{Params, Source};
use super::sql::{Expect, Statement};
use crate::model::delivery::Delivery;
use crate::model::pointer::Pointers;
use crate::model::subject::SubjectPattern;

const DEEDS: [&str; 4] = ["sql", "http", "record", "ignore"];

/// A route.
pub struct Route {
    /// `route 2`, for texts.
    pub name: String,
    pub subject: SubjectPattern,
    when: Option<When>,
    /// Orders of one key run one after the other.
    pub key: Option<Picked>,
    pub params: Params,
    pub deed: Deed,
}

/// What a route does with an order.
pub enum Deed {
    Sql(Vec<Statement>),
    Http(Box<Endpoint>),
    /// The built-in table.
    Record,
    Ignore,
}

/// One value of an order, as text.
pub struct Picked {
    source: Source,
    pointers: Pointers,
}

/// A condition beside the subject.
struct When {
    picked: Picked,
    is: String,
}

impl Route {
    /// `None` if the route cannot be used even for further checks. The problems are noted.
    pub fn read(section: &Section<'_>, place: &Place<'_>) -> Option<Self> {
        section.known(&["subject", "when", "key", "params", "sql", "http", "record", "ignore"]);
        let subject = match section.text("subject").map(str::parse::<SubjectPattern>) {
            Some(Ok(subject)) => Some(subject),
            Some(Err(allowed)) => {
                section.note(format!("subject must be {allowed}"));
                None
            }
            None => {
                if !section.has("subject") {
                    section.note("it has no subject");
                }
                None
            }
        };
        let when = section.section("when").and_then(|when| When::read(&when));
        let key = section.section("key").and_then(|key| {
            key.known(&["json", "header", "subject"]);
            Picked::read(&key)
        });
        if key.is_some() && section.has("ignore") {
            section.note("key is not for a route with ignore");
        }
        let params = Params::read(section);
        let deed = Deed::read(section, &params, place);
        if params.declared_count() > 0 && !matches!(deed, Some(Deed::Sql(_)) | None) {
            section.note("params are only for a route with sql");
        }
        Some(Self { name: section.name(), subject: subject?, when, key, params, deed: deed? })
    }

    pub fn matches(&self, delivery: &Delivery) -> bool {
        self.subject.matches(&delivery.raw.subject) && self.when.as_ref().is_none_or(|when| when.holds(delivery))
    }

    pub fn endpoint(&self) -> Option<&Endpoint> {
        if let Deed::Http(endpoint) = &self.deed { Some(endpoint) } else { None }
    }

    /// Whether every order with a subject that the route is for takes it.
    pub fn takes_all(&self) -> bool {
        self.when.is_none()
    }
}

impl When {
    fn read(section: &Section<'_>) -> Option<Self> {
        section.known(&["json", "header", "subject", "is"]);
        let picked = Picked::read(section);
        let is = match section.value("is") {
            Some(toml::Value::String(text)) => text.clone(),
            Some(toml::Value::Integer(number)) => number.to_string(),
            Some(toml::Value::Boolean(value)) => value.to_string(),
            Some(_) | None => {
                section.note("it needs `is`, with the text that the value must be equal to");
                return None;
            }
        };
        Some(Self { picked: picked?, is })
    }

    /// A missing value, and a payload that is not JSON, do not match.
    fn holds(&self, delivery: &Delivery) -> bool {
        self.picked.text(delivery).as_ref() == Some(&self.is)
    }
}

impl Picked {
    fn read(section: &Section<'_>) -> Option<Self> {
        let mut pointers = Pointers::default();
        let source = Source::read(section, &mut pointers)?;
        Some(Self { source, pointers })
    }

    /// `None` for a missing or null value, and for a payload that is not JSON.
    pub fn text(&self, delivery: &Delivery) -> Option<String> {
        let found = if self.pointers.is_empty() { None } else { self.pointers.find(&delivery.raw.payload).ok() };
        self.source.plain_text(delivery, found.as_deref())
    }

    /// Why an order has no such value.
    pub fn missing(&self) -> String {
        match &self.source {
            Source::Json { pointer, .. } => format!("the payload has no value at {pointer}"),
            Source::Header(name) => format!("the message has no header {name}"),
            Source::Token(number) => format!("the subject has no token {number}"),
            other @ (Source::Id
            | Source::WholeSubject
            | Source::StreamSeq
            | Source::PublishedAt
            | Source::Now
            | Source::Headers
            | Source::Payload
            | Source::PayloadBytes) => format!("the message has no {other:?}"),
        }
    }
}

impl Deed {
    fn read(section: &Section<'_>, params: &Params, place: &Place<'_>) -> Option<Self> {
        let named: Vec<&str> = DEEDS.into_iter().filter(|key| section.has(key)).collect();
        let [deed] = named[..] else {
            section.note("it needs exactly one of [[route.sql]], [route.http], record = true, ignore = true");
            return None;
        };
        match deed {
            "sql" => {
                let sections = section.sections("sql", "statement");
                if sections.is_empty()
                    && section.value(deed).is_some_and(|sql| sql.as_array().is_some_and(Vec::is_empty))
                {
                    section.note("sql has no statement; write [[route.sql]]");
                }
                let statements: Vec<_> =
                    sections.iter().filter_map(|statement| Statement::read(statement, params)).collect();
                unused(section, params, &statements, sections.len());
                // A statement with a problem is left out. The others are still checked.
                Some(Self::Sql(statements))
            }
            "http" => {
                let table = section.value("http")?.clone();
                let http = match table.try_into::<HttpRoute>() {
                    Ok(http) => http,
                    Err(error) => {
                        section.note(format!("http: {}", error.message().replace('\n', ", ")));
                        return None;
                    }
                };
                match Endpoint::new(&http, place) {
                    Ok(endpoint) => Some(Self::Http(Box::new(endpoint))),
                    Err(problems) => {
                        problems.iter().for_each(|problem| section.note(format!("http: {problem}")));
                        None
                    }
                }
            }
            deed => {
                if !section.flag(deed) {
                    section.note(format!("{deed} can only be true; remove it, or write {deed} = true"));
                    return None;
                }
                Some(if deed == "record" { Self::Record } else { Self::Ignore })
            }
        }
    }
}

/// A parameter that no statement uses is a mistyped one.
fn unused(section: &Section<'_>, params: &Params, statements: &[Statement], count: usize) {
    if statements.len() < count {
        return;
    }
    for (index, param) in params.params.iter().enumerate().take(params.declared_count()) {
        if !statements.iter().any(|statement| statement.wanted.contains(&index)) {
            section.note(format!("params.{}: no statement uses :{}", param.name, param.name));
        }
    }
}

/// Notes each route that an earlier one leaves nothing for.
pub fn unreachable(file: &Section<'_>, routes: &[Route]) {
    for (index, route) in routes.iter().enumerate() {
        let before = routes[..index].iter().find(|before| before.takes_all() && before.subject.covers(&route.subject));
        if let Some(before) = before {
            file.note(format!(
                "{}: no order reaches it: {} takes all with subject {}; put the narrower route first",
                route.name, before.name, before.subject
            ));
        }
    }
}

impl Statement {
    fn read(section: &Section<'_>, params: &Params) -> Option<Self> {
        section.known(&["run", "expect", "otherwise", "because"]);
        let expect = Expect::read(section);
        let Some(text) = section.text("run") else {
            if !section.has("run") {
                section.note("it has no `run` with the SQL");
            }
            return None;
        };
        let scanned = match super::sql::scan::scan(text) {
            Ok(scanned) => scanned,
            Err(problem) => {
                section.note(problem);
                return None;
            }
        };
        let mut wanted = Vec::with_capacity(scanned.names.len());
        for name in &scanned.names {
            match params.params.iter().position(|param| param.name == *name) {
                Some(index) => wanted.push(index),
                None => {
                    let names = params.params.iter().map(|param| param.name.as_str());
                    section.note(format!("unknown parameter :{name}{}", meant(name, names)));
                }
            }
        }
        (wanted.len() == scanned.names.len()).then(|| Self::new(section.name(), scanned, wanted, expect))
    }
}
