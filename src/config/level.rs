//! The grammar of `log.level`.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// The part of `log.level` that cannot be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part:?} is not a log level: allowed are off, error, warn, info, debug, trace, and target=level, with commas")]
pub struct LevelError {
    pub part: String,
}

/// Crates that tell more at `info` than an operator of this daemon wants to read, and what is left of them. What the connector
/// complains of at each attempt comes to us as an error or an event as well, and we say it once.
const QUIET: [(&str, &str, LevelFilter); 3] = [
    ("async_nats", "async_nats", LevelFilter::WARN),
    ("async_nats", "async_nats::connector", LevelFilter::OFF),
    ("sqlx", "sqlx", LevelFilter::WARN),
];

/// Reads `info` or `info,order_processor::worker::worker=debug`. `async_nats` and `sqlx` say at most warnings unless they are
/// named.
///
/// Our own parser, because the one of the library takes a misspelt `inof` for a target, enables that and nothing else.
pub fn parse_level(level: &str) -> Result<Targets, LevelError> {
    let mut default = LevelFilter::INFO;
    let mut targets = Targets::new();
    for part in level.split(',').map(str::trim) {
        let refused = || LevelError { part: part.to_owned() };
        match part.split_once('=') {
            None => default = level_filter(part).ok_or_else(refused)?,
            Some((target, level)) if !target.is_empty() => {
                targets = targets.with_target(target, level_filter(level).ok_or_else(refused)?);
            }
            Some(_) => return Err(refused()),
        }
    }
    let named: Vec<String> = targets.iter().map(|(target, _)| target.to_owned()).collect();
    for (library, target, most) in QUIET {
        if !named.iter().any(|named| named.starts_with(library)) {
            targets = targets.with_target(target, default.min(most));
        }
    }
    Ok(targets.with_default(default))
}

fn level_filter(name: &str) -> Option<LevelFilter> {
    match name.to_ascii_lowercase().as_str() {
        "off" => Some(LevelFilter::OFF),
        "error" => Some(LevelFilter::ERROR),
        "warn" => Some(LevelFilter::WARN),
        "info" => Some(LevelFilter::INFO),
        "debug" => Some(LevelFilter::DEBUG),
        "trace" => Some(LevelFilter::TRACE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn the_level_holds_for_us_and_the_client_libraries_stay_at_warnings() {
        let targets = parse_level("debug").unwrap();
        assert!(targets.would_enable("order_processor::worker::worker", &Level::DEBUG));
        assert!(targets.would_enable("async_nats::client", &Level::WARN));
        assert!(!targets.would_enable("async_nats::client", &Level::INFO));
        assert!(!targets.would_enable("async_nats::connector", &Level::ERROR), "it comes as an event as well");
        assert!(!targets.would_enable("sqlx::query", &Level::INFO));
    }

    #[test]
    fn a_library_that_is_named_says_what_was_asked_for() {
        let targets = parse_level("info, sqlx::query=debug").unwrap();
        assert!(targets.would_enable("sqlx::query", &Level::DEBUG));
        assert!(!targets.would_enable("async_nats", &Level::INFO));
        assert!(!targets.would_enable("order_processor", &Level::DEBUG));
        assert!(parse_level("info,async_nats=debug").unwrap().would_enable("async_nats::connector", &Level::DEBUG));
    }

    #[test]
    fn the_quiet_libraries_are_never_louder_than_the_rest() {
        let targets = parse_level("error").unwrap();
        assert!(!targets.would_enable("sqlx::query", &Level::WARN));
        assert!(!parse_level("off").unwrap().would_enable("async_nats", &Level::ERROR));
    }

    #[test]
    fn a_misspelt_level_is_an_error_that_names_it() {
        for (level, part) in
            [("inof", "inof"), ("info,sqlx=loud", "sqlx=loud"), ("", ""), ("info,", ""), ("=info", "=info")]
        {
            assert_eq!(parse_level(level), Err(LevelError { part: part.to_owned() }), "{level:?}");
        }
    }
}
