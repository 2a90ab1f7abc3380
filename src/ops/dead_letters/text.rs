//! How dead letters are printed. Publishers write their content, so no control character of it may reach the terminal.

use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::model::letter::{Envelope, Letter, Pile};
use crate::model::text::{printable, shortened};
use crate::model::time::{nanos_text, seconds_text};

/// Characters of an error in the table, and of each other text. Ids and subjects are as long as their publishers like.
const ERROR_MAX: usize = 60;
const TEXT_MAX: usize = 100;
/// Characters of one field where a dead letter is shown, headers shown, bytes of the payload, and levels of JSON that are indented.
pub const FIELD_MAX: usize = 2000;
const HEADERS_MAX: usize = 100;
const PAYLOAD_MAX: usize = 64 * 1024;
const DEPTH_MAX: usize = 32;
const COLUMNS: usize = 7;

/// One line a letter, the columns aligned. The head comes with the first one.
pub fn table(
    page: &[(i64, Envelope)],
    pile: Pile,
    widths: &mut Option<[usize; COLUMNS]>,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut rows: Vec<[String; COLUMNS]> = page.iter().map(|(_, envelope)| row(envelope)).collect();
    if rows.is_empty() {
        return Ok(());
    }
    if widths.is_none() {
        let at = if pile == Pile::Closed { "CLOSED AT" } else { "DEAD AT" };
        let last = if pile == Pile::Closed { "CLOSED" } else { "ERROR" };
        rows.insert(0, [at, "REASON", "SUBJECT", "SEQ", "BYTES", "ID", last].map(ToOwned::to_owned));
    }
    let widths = widths.get_or_insert_with(|| {
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
    });
    for [at, reason, subject, seq, bytes, id, last] in rows {
        let [w0, w1, w2, w3, w4, w5, _] = *widths;
        writeln!(out, "{at:w0$}  {reason:w1$}  {subject:w2$}  {seq:>w3$}  {bytes:>w4$}  {id:w5$}  {last}")?;
    }
    Ok(())
}

fn row(envelope: &Envelope) -> [String; COLUMNS] {
    let (at_ns, last) = match &envelope.closed {
        Some(closed) => (closed.at_ns, format!("{} by {}", closed.closing.name(), closed.by)),
        None => (envelope.dead_at_ns, envelope.error.clone()),
    };
    [
        seconds_text(at_ns),
        shortened(&envelope.reason, TEXT_MAX),
        shortened(&envelope.subject, TEXT_MAX),
        envelope.stream_seq.to_string(),
        envelope.payload_bytes.to_string(),
        shortened(&envelope.id, TEXT_MAX),
        shortened(&last, ERROR_MAX),
    ]
}

/// A dead letter for people. Everything in it is bounded; a last line says where the rest is.
pub fn show(letter: &Letter, out: &mut impl Write) -> io::Result<()> {
    let Letter { envelope, headers, payload } = letter;
    let mut cut = false;
    let mut row = |name: &str, value: &str| {
        let shown = shortened(value, FIELD_MAX);
        cut |= shown.ends_with('…');
        writeln!(out, "{name:<13} {shown}")
    };
    row("id", &envelope.id)?;
    row("subject", &envelope.subject)?;
    row("stream seq", &envelope.stream_seq.to_string())?;
    row("delivered", &envelope.delivered.to_string())?;
    row("published at", &envelope.published_ns.map_or_else(|| "not known".to_owned(), nanos_text))?;
    row("dead at", &nanos_text(envelope.dead_at_ns))?;
    row("reason", &envelope.reason)?;
    row("error", &envelope.error)?;
    row("digest", &envelope.digest.to_string())?;
    if let Some(closed) = &envelope.closed {
        row(closed.closing.name(), &format!("by {} at {}", closed.by, nanos_text(closed.at_ns)))?;
        if let Some(id) = closed.applied_id.as_ref().filter(|id| **id != envelope.id) {
            row("applied as", id)?;
        }
    }
    for (index, (name, value)) in headers.iter().take(HEADERS_MAX).enumerate() {
        row(if index == 0 { "headers" } else { "" }, &format!("{name}: {value}"))?;
    }
    let (kind, shown) = payload_text(payload);
    row("payload", &format!("{} bytes, {kind}", payload.len()))?;
    cut |= headers.len() > HEADERS_MAX || payload.len() > PAYLOAD_MAX;
    if !shown.is_empty() {
        writeln!(out, "\n{shown}")?;
    }
    if cut {
        writeln!(out, "\n… cut off; `order-processor dead-letters show --json ID` prints everything")?;
    }
    Ok(())
}

/// An envelope as an object.
pub fn fields(envelope: &Envelope) -> Value {
    let mut object = json!({
        "id": envelope.id,
        "digest": envelope.digest.to_string(),
        "subject": envelope.subject,
        "stream_seq": envelope.stream_seq,
        "delivered": envelope.delivered,
        "reason": envelope.reason,
        "error": envelope.error,
        "payload_bytes": envelope.payload_bytes,
        "published_at": envelope.published_ns.map(nanos_text),
        "dead_at": nanos_text(envelope.dead_at_ns),
    });
    if let Some(closed) = &envelope.closed {
        object["closed"] = json!({
            "as": closed.closing.name(),
            "by": closed.by,
            "at": nanos_text(closed.at_ns),
            "applied_id": closed.applied_id,
        });
    }
    object
}

/// A letter as an object that has all of it: headers as pairs in their order, payload in base64.
pub fn whole(letter: &Letter) -> Value {
    let mut object = fields(&letter.envelope);
    object["headers"] = json!(letter.headers);
    object["payload"] = Value::String(BASE64.encode(&letter.payload));
    object
}

/// The kind of a payload, and the text of its first [`PAYLOAD_MAX`] bytes.
fn payload_text(payload: &[u8]) -> (&'static str, String) {
    let whole = std::str::from_utf8(payload).ok();
    // Reads nested values without a stack, so no payload is too deep for it.
    let is_json = whole.is_some() && serde_json::from_slice::<IgnoredAny>(payload).is_ok();
    let is_text = |text: &str| !text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t'));
    match whole.map(|text| &text[..text.floor_char_boundary(PAYLOAD_MAX)]) {
        Some(text) if is_json => ("JSON", printable_lines(&pretty(text))),
        Some(text) if is_text(text) => ("text", printable_lines(text)),
        Some(_) | None => ("binary", hex(&payload[..payload.len().min(PAYLOAD_MAX)])),
    }
}

/// Printable, with the lines kept.
fn printable_lines(text: &str) -> String {
    text.lines().map(printable).collect::<Vec<_>>().join("\n")
}

/// JSON with one value a line, down to [`DEPTH_MAX`] levels; what is deeper stays on the line of its parent. Every value stays as
/// it is written: a number that a parser would round is not rounded here.
fn pretty(json: &str) -> String {
    let mut text = String::with_capacity(json.len() * 2);
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    let mut chars = json.chars().peekable();
    let line = |text: &mut String, depth: usize| {
        if depth <= DEPTH_MAX {
            text.push('\n');
            text.extend(std::iter::repeat_n("  ", depth));
        }
    };
    while let Some(c) = chars.next() {
        if in_string {
            text.push(c);
            in_string = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        match c {
            ' ' | '\t' | '\n' | '\r' => {}
            '{' | '[' => {
                text.push(c);
                while chars.next_if(|c| c.is_ascii_whitespace()).is_some() {}
                if let Some(end) = chars.next_if(|c| matches!(c, '}' | ']')) {
                    text.push(end);
                } else {
                    depth += 1;
                    line(&mut text, depth);
                }
            }
            '}' | ']' => {
                if depth <= DEPTH_MAX {
                    line(&mut text, depth.saturating_sub(1));
                }
                depth = depth.saturating_sub(1);
                text.push(c);
            }
            ',' => {
                text.push(c);
                line(&mut text, depth);
            }
            ':' => text.push_str(": "),
            c => {
                in_string = c == '"';
                text.push(c);
            }
        }
    }
    text
}

/// Offset, sixteen bytes, and those of them that are letters.
fn hex(bytes: &[u8]) -> String {
    let mut lines = Vec::with_capacity(bytes.len() / 16 + 1);
    for (index, row) in bytes.chunks(16).enumerate() {
        let codes: Vec<String> = row.iter().map(|byte| format!("{byte:02x}")).collect();
        let letters: String = row
            .iter()
            .map(|byte| if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' })
            .collect();
        lines.push(format!("{:08x}  {:<47}  {letters}", index * 16, codes.join(" ")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_laid_out_and_no_value_is_changed() {
        let json = r#"{"id":90071992547409931234,"a": [1e400, {} , [ ], "x\"}:,\\"],"b":null}"#;
        let wanted = "{\n  \"id\": 90071992547409931234,\n  \"a\": [\n    1e400,\n    {},\n    [],\n    \"x\\\"}:,\\\\\"\n  ],\n  \"b\": null\n}";
        assert_eq!(payload_text(json.as_bytes()), ("JSON", wanted.to_owned()));
        assert_eq!(payload_text(b"3"), ("JSON", "3".to_owned()));
    }

    #[test]
    fn text_stays_text_and_the_rest_is_a_dump_that_no_terminal_obeys() {
        assert_eq!(payload_text("Zwei\tÄpfel\n".as_bytes()), ("text", "Zwei\\tÄpfel".to_owned()));
        let (kind, dump) = payload_text(b"\x1b]0;title\x07 and \xff more");
        assert_eq!(kind, "binary");
        assert_eq!(
            dump,
            "00000000  1b 5d 30 3b 74 69 74 6c 65 07 20 61 6e 64 20 ff  .]0;title. and .\n\
             00000010  20 6d 6f 72 65                                    more"
        );
        assert_eq!(payload_text(b""), ("text", String::new()));
    }

    #[test]
    fn deep_and_large_payloads_are_cut_and_the_text_says_where_the_rest_is() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        let (kind, shown) = payload_text(deep.as_bytes());
        assert_eq!(kind, "JSON");
        assert!(shown.len() < 2 * PAYLOAD_MAX, "{}", shown.len());
        let wide = format!("[{}1]", "1,".repeat(1_000_000));
        assert!(payload_text(wide.as_bytes()).1.len() < 4 * PAYLOAD_MAX);
        assert!(payload_text(&[0xff; 1_000_000]).1.len() < 6 * PAYLOAD_MAX);
        let umlauts = format!("x{}", "ä".repeat(100_000));
        assert_eq!(payload_text(umlauts.as_bytes()).0, "text", "cut between characters");
        assert_eq!(pretty("[[1],{}]"), "[\n  [\n    1\n  ],\n  {}\n]");
    }
}
