//! One table of the handler file, read by hand: a deserializer stops at the first problem, and an operator wants to see all.

use std::cell::RefCell;

use toml::{Table, Value};

/// The most letters in which a name may differ from one that is suggested instead, in parts of its length.
const NEAR: usize = 3;

/// A table, and where it stands.
pub struct Section<'f> {
    at: String,
    table: &'f Table,
    notes: &'f RefCell<Vec<String>>,
}

impl<'f> Section<'f> {
    pub fn new(at: String, table: &'f Table, notes: &'f RefCell<Vec<String>>) -> Self {
        Self { at, table, notes }
    }

    /// Where the table stands in the file, for texts: `route 1, statement 2`.
    pub fn name(&self) -> String {
        self.at.rsplit_once(": ").map_or(self.at.as_str(), |(_, name)| name).to_owned()
    }

    /// Reports a problem of this table.
    pub fn note(&self, problem: impl std::fmt::Display) {
        self.notes.borrow_mut().push(format!("{}: {problem}", self.at));
    }

    /// Reports the keys that the table must not have.
    pub fn known(&self, known: &[&str]) {
        for key in self.table.keys().filter(|key| !known.contains(&key.as_str())) {
            let meant = meant(key, known.iter().copied());
            self.note(format!("unknown key {key:?}{meant}; known are: {}", known.join(", ")));
        }
    }

    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &'f str> {
        self.table.keys().map(String::as_str)
    }

    pub fn value(&self, key: &str) -> Option<&'f Value> {
        self.table.get(key)
    }

    /// A text, if the key is there and is one.
    pub fn text(&self, key: &str) -> Option<&'f str> {
        match self.table.get(key)? {
            Value::String(text) => Some(text),
            other => self.wrong(key, "a text in quotes", other),
        }
    }

    /// `false` if the key is not there.
    pub fn flag(&self, key: &str) -> bool {
        match self.table.get(key) {
            None => false,
            Some(Value::Boolean(flag)) => *flag,
            Some(other) => self.wrong(key, "true or false", other).unwrap_or_default(),
        }
    }

    pub fn whole_number(&self, key: &str) -> Option<i64> {
        match self.table.get(key)? {
            Value::Integer(number) => Some(*number),
            other => self.wrong(key, "a whole number", other),
        }
    }

    /// A table inside this one.
    pub fn section(&self, key: &str) -> Option<Section<'f>> {
        match self.table.get(key)? {
            Value::Table(table) => Some(Section { at: format!("{}: {key}", self.at), table, notes: self.notes }),
            other => self.wrong(key, "a table", other),
        }
    }

    /// A list of tables, each with its number from 1.
    pub fn sections(&self, key: &str, name: &str) -> Vec<Section<'f>> {
        let list = match self.table.get(key) {
            None => return Vec::new(),
            Some(Value::Array(list)) => list,
            Some(other) => return self.wrong(key, &format!("a list: write [[{key}]]"), other).unwrap_or_default(),
        };
        let mut sections = Vec::with_capacity(list.len());
        for (value, number) in list.iter().zip(1..) {
            match value {
                Value::Table(table) => {
                    let separator = if name == "route" { ": " } else { ", " };
                    sections.push(Section {
                        at: format!("{}{separator}{name} {number}", self.at),
                        table,
                        notes: self.notes,
                    });
                }
                other => drop(self.wrong::<()>(key, "a list of tables", other)),
            }
        }
        sections
    }

    fn wrong<T>(&self, key: &str, wanted: &str, found: &Value) -> Option<T> {
        self.note(format!("{key} must be {wanted}, and it is {}", kind(found)));
        None
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a text",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

/// `, did you mean "cents"?`, or nothing if no name is near.
pub fn meant<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> String {
    let near = names
        .map(|candidate| (strsim::levenshtein(&name.to_lowercase(), &candidate.to_lowercase()), candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= candidate.len().max(name.len()).div_ceil(NEAR));
    near.map_or_else(String::new, |(_, candidate)| format!(", did you mean {candidate:?}?"))
}
