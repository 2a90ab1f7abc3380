//! `config`: the effective settings and their sources. [`Loaded::settings`] contains no secret, so nothing is redacted here.

use std::io::{self, Write};

use serde::Serialize;

use crate::config::{Loaded, Setting};
use crate::ops::Format;

/// Prints every setting, in the order of `config/default.toml`: an aligned table, or a JSON array of objects with
/// `key`, `value` (`null` if not set) and `source`.
pub fn run(loaded: &Loaded, format: Format, out: &mut impl Write) -> io::Result<()> {
    match format {
        Format::Json => write_json(&loaded.settings, out),
        Format::Text => write_table(&loaded.settings, out),
    }
}

fn write_table(settings: &[Setting], out: &mut impl Write) -> io::Result<()> {
    let rows = settings.iter().map(|setting| (setting.key, shown(&setting.value), setting.source.as_str()));
    let rows: Vec<_> = std::iter::once(("KEY", "VALUE", "SOURCE")).chain(rows).collect();
    let key_width = rows.iter().map(|row| row.0.chars().count()).max().unwrap_or(0);
    let value_width = rows.iter().map(|row| row.1.chars().count()).max().unwrap_or(0);
    for (key, value, source) in rows {
        writeln!(out, "{key:key_width$}  {value:value_width$}  {source}")?;
    }
    Ok(())
}

/// No setting can be the empty text, so the empty text can stand for "not set".
fn shown(value: &str) -> &str {
    if value.is_empty() { "(not set)" } else { value }
}

#[derive(Serialize)]
struct Row<'a> {
    key: &'a str,
    value: Option<&'a str>,
    source: &'a str,
}

fn write_json(settings: &[Setting], out: &mut impl Write) -> io::Result<()> {
    let rows: Vec<_> = settings
        .iter()
        .map(|setting| Row {
            key: setting.key,
            value: Some(setting.value.as_str()).filter(|value| !value.is_empty()),
            source: &setting.source,
        })
        .collect();
    serde_json::to_writer_pretty(&mut *out, &rows)?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn output(format: Format) -> String {
        let env = [("ORDER_PROCESSOR__NATS__URL".into(), "nats://alice:hunter2@broker".into())];
        let file = tempfile::NamedTempFile::new().unwrap();
        let loaded = Config::load(Some(file.path()), env).unwrap();
        let mut out = Vec::new();
        run(&loaded, format, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_table_is_aligned_and_names_each_source() {
        let table = output(Format::Text);
        let lines: Vec<&str> = table.lines().collect();
        let source_column = lines[0].find("SOURCE").unwrap();
        assert!(lines[1].starts_with("nats.url"), "{table}");
        assert_eq!(&lines[1][source_column..], "environment ORDER_PROCESSOR__NATS__URL");
        assert!(lines[2..].iter().all(|line| &line[source_column..] == "default"), "{table}");
        assert!(table.contains("(not set)"), "{table}");
    }

    #[test]
    fn the_json_is_an_array_of_key_value_source_with_null_for_not_set() {
        let rows: serde_json::Value = serde_json::from_str(&output(Format::Json)).unwrap();
        let row = |key: &str| rows.as_array().unwrap().iter().find(|row| row["key"] == key).unwrap().clone();
        assert_eq!(row("retry.max_attempts")["value"], "5");
        assert_eq!(row("nats.url")["source"], "environment ORDER_PROCESSOR__NATS__URL");
        assert!(row("nats.user")["value"].is_null());
    }

    #[test]
    fn neither_form_prints_a_password() {
        for format in [Format::Text, Format::Json] {
            let text = output(format);
            assert!(text.contains("nats://***@broker"), "{text}");
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
