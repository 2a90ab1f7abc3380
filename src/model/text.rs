//! How an error becomes one line of text.

use std::error::Error;

/// An error with all its causes. `Display` of our errors leaves the source out; the drivers' errors repeat it, and what ends the
/// text already is not said twice.
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

#[cfg(test)]
mod tests {
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
}
