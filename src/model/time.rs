//! Points in time, as the server and the tables count them and as people and programs read them, and delays that double.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970 UTC, as the server and the tables count time. 0 for what is earlier.
pub fn unix_ns(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

/// The point in time that [`unix_ns`] counts. 1970 for what is earlier.
pub fn from_unix_ns(ns: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(ns.max(0).unsigned_abs())
}

/// RFC 3339 in UTC, to the second.
pub fn seconds_text(ns: i64) -> String {
    humantime::format_rfc3339_seconds(from_unix_ns(ns)).to_string()
}

/// RFC 3339 in UTC, to the millisecond.
pub fn millis_text(ns: i64) -> String {
    humantime::format_rfc3339_millis(from_unix_ns(ns)).to_string()
}

/// RFC 3339 in UTC, to the nanosecond.
pub fn nanos_text(ns: i64) -> String {
    humantime::format_rfc3339_nanos(from_unix_ns(ns)).to_string()
}

/// How long ago `ns` was, to the second; zero for the future.
pub fn age(ns: i64, now: SystemTime) -> Duration {
    let ns = unix_ns(now).saturating_sub(ns).max(0).unsigned_abs();
    Duration::from_secs(ns / 1_000_000_000)
}

/// RFC 3339 with milliseconds, for JSON.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: serde::Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*at))
}

/// The same for a point in time that may not be known; then `null`. As `#[serde(with = "time::optional")]`.
pub mod optional {
    use std::time::SystemTime;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(at: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
        match at {
            Some(at) => super::serialize(at, serializer),
            None => serializer.serialize_none(),
        }
    }

    /// # Errors
    /// When a text is there and is not RFC 3339.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SystemTime>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| humantime::parse_rfc3339(&text).map_err(D::Error::custom)).transpose()
    }
}

/// A delay between attempts: `min`, doubled `times` times, at most `max`.
pub fn doubled(min: Duration, times: u32, max: Duration) -> Duration {
    min.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX)).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_back_as_they_are_written() {
        let ns = 1_700_000_000_123_456_789;
        assert_eq!(unix_ns(from_unix_ns(ns)), ns);
        assert_eq!(seconds_text(ns), "2023-11-14T22:13:20Z");
        assert_eq!(millis_text(ns), "2023-11-14T22:13:20.123Z");
        assert_eq!(nanos_text(ns), "2023-11-14T22:13:20.123456789Z");
        assert_eq!(unix_ns(from_unix_ns(-5)), 0);
        assert_eq!(age(ns, from_unix_ns(ns + 2_999_999_999)), Duration::from_secs(2));
        assert_eq!(age(ns, from_unix_ns(ns - 1)), Duration::ZERO);
    }

    #[test]
    fn delays_double_up_to_their_maximum() {
        let second = Duration::from_secs(1);
        assert_eq!([0, 1, 2, 3].map(|times| doubled(second, times, second * 5).as_secs()), [1, 2, 4, 5]);
        assert_eq!(doubled(second, 1000, second * 7), second * 7, "no overflow");
    }
}
