//! How an error becomes one line of text.

use std::error::Error;

/// An error with all its causes. `Display` of our errors leaves the source out, so that nothing is said twice here.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
