//! Points in time: as the server and the tables count them, and as people and programs read them.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serializer;

/// Nanoseconds since 1970 UTC, as the server and the tables count time.
pub fn unix_ns(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

/// RFC 3339 with milliseconds, for JSON.
///
/// # Errors
/// Whatever the serializer says.
pub fn serialize<S: Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*at))
}

/// The same for a point in time that may not be known; then `null`.
///
/// # Errors
/// Whatever the serializer says.
pub fn serialize_optional<S: Serializer>(at: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => serialize(at, serializer),
        None => serializer.serialize_none(),
    }
}
