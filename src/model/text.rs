//! How errors, and texts that come from messages, become text that is safe to show.

use std::any::Any;
use std::borrow::Cow;
use std::error::Error;
use std::fmt::Write;

use serde::Serialize;

/// An error with all its causes. `Display` of our errors leaves the source out. Errors of drivers repeat their source, so a cause
/// that the text already ends with is left out.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}

/// The message of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// The first line of a text.
pub fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The text on one line, with everything escaped that a terminal obeys or does not show: control characters (C0, C1, ESC, line
/// breaks), marks that turn the direction of writing, and characters without a shape.
///
/// For every text that comes from a message, a server or a file, in every output that is not JSON. See [`json`] for those.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hidden(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// The first characters of [`printable`] text, at most `max`, with `…` where something is cut off.
pub fn shortened(text: &str, max: usize) -> String {
    // Only so much is looked at: an id may have megabytes.
    let end = text.char_indices().nth(max + 1).map_or(text.len(), |(end, _)| end);
    let shown = printable(&text[..end]);
    match shown.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None => shown.into_owned(),
    }
}

/// A value as JSON on one line, with the characters that [`printable`] escapes written as `\u…`: a JSON parser reads the same
/// value, and a terminal shows nothing else.
///
/// # Errors
/// When the value cannot be JSON.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(hidden_as_json(&serde_json::to_string(value)?).into_owned())
}

/// JSON text with the same escapes. In JSON that was written by a serializer, such characters only stand in strings.
pub fn hidden_as_json(json: &str) -> Cow<'_, str> {
    let is_layout = |c: char| matches!(c, '\n' | '\r' | '\t');
    if !json.chars().any(|c| is_hidden(c) && !is_layout(c)) {
        return Cow::Borrowed(json);
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if !is_hidden(c) || is_layout(c) {
            shown.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            write!(shown, "\\u{unit:04x}").expect("writing to a string cannot fail");
        }
    }
    Cow::Owned(shown)
}

/// Whether a character does something instead of showing something.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' // soft hyphen
            | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' // direction
            | '\u{2028}' | '\u{2029}' // line and paragraph
            | '\u{180e}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{206a}'..='\u{206f}' // without a shape
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{said}")]
    struct Saying {
        said: &'static str,
        source: Option<Box<Saying>>,
    }

    #[test]
    fn causes_are_said_once_each() {
        let disk = Saying { said: "disk full", source: None };
        let driver = Saying { said: "driver: disk full", source: Some(Box::new(disk)) };
        let ours = Saying { said: "committing", source: Some(Box::new(driver)) };
        assert_eq!(chain(&ours), "committing: driver: disk full");
    }

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        assert_eq!(printable("a\u{1b}[2J\nü \u{9b}31m\u{202e}x\\"), "a\\u{1b}[2J\\nü \\u{9b}31m\\u{202e}x\\");
        assert_eq!(printable("Zwölf 注文 🚚"), "Zwölf 注文 🚚");
        assert_eq!(shortened("ab\u{1b}", 2), "ab…");
        assert_eq!(shortened("a\u{1b}", 6), "a\\u{1b…");
        assert_eq!(shortened("ab", 2), "ab");
    }

    proptest! {
        #[test]
        fn json_says_the_same_with_nothing_hidden_in_it(text in "(\\PC|[\r\n\t\u{0}-\u{9f}\u{202e}\u{2028}\u{feff}\u{e0001}]){0,20}") {
            let json = json(&text).unwrap();
            prop_assert!(!json.chars().any(is_hidden), "{json:?}");
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }
}
