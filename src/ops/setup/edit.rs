//! Compares what exists with the options that were given, and changes exactly these on request.
//!
//! The configuration is read and written as the server's own JSON: a setting that the client library does not know stays.

use std::io::Write;
use std::time::{Duration, SystemTime};

use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::Info as StreamInfo;
use serde_json::{Map, Value, json};

use super::{Server, SetupArgs, SetupError, Unset, beyond_limit, refused};
use crate::ops::teardown::ask;

type JsonSettings = Map<String, Value>;

/// JsonSettings that are durations in nanoseconds.
const DURATIONS: [&str; 4] = ["max_age", "duplicate_window", "ack_wait", "inactive_threshold"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SetupTarget {
    Stream,
    Consumer,
}

/// One setting as it was asked for; null to remove it.
pub(super) struct Asked {
    key: &'static str,
    wanted: Value,
    /// The server can edit it without a loss.
    editable: bool,
}

pub(super) fn of_stream(args: &SetupArgs) -> Vec<Asked> {
    let mut asked = Vec::new();
    let mut ask = |key, wanted: Option<Value>| asked.extend(wanted.map(|wanted| Asked { key, wanted, editable: true }));
    ask("subjects", (!args.subjects.is_empty()).then(|| json!(args.subjects)));
    // The server keeps 0 as -1.
    let bytes = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
    ask("max_bytes", args.max_bytes.map(|size| if size.0 == 0 { json!(-1) } else { json!(bytes(size.0)) }));
    ask("max_age", args.max_age.map(nanoseconds));
    ask("duplicate_window", args.duplicate_window.map(nanoseconds));
    ask("num_replicas", args.replicas.map(|replicas| json!(replicas)));
    ask("consumer_limits", args.unset.contains(&Unset::ConsumerLimits).then_some(Value::Null));
    asked
}

pub(super) fn of_consumer(args: &SetupArgs) -> Vec<Asked> {
    let mut asked = Vec::new();
    let mut ask =
        |key, wanted: Option<Value>, editable| asked.extend(wanted.map(|wanted| Asked { key, wanted, editable }));
    ask("ack_wait", args.ack_wait.map(nanoseconds), true);
    ask("max_ack_pending", args.max_ack_pending.map(|max| json!(max)), true);
    // On interest retention the server deletes what another filter leaves out.
    ask("filter_subjects", (!args.filter.is_empty()).then(|| json!(args.filter)), false);
    ask("opt_start_seq", args.start_seq.map(|start| json!(start)), false);
    for (unset, key, none) in [
        (Unset::MaxDeliver, "max_deliver", json!(-1)),
        (Unset::Backoff, "backoff", Value::Null),
        (Unset::InactiveThreshold, "inactive_threshold", Value::Null),
        (Unset::HeadersOnly, "headers_only", Value::Null),
        (Unset::MaxRequestBytes, "max_bytes", Value::Null),
    ] {
        ask(key, args.unset.contains(&unset).then_some(none), true);
    }
    asked
}

/// Names what differs, or changes it with `--update`. `true` if something was left as it is.
pub(super) async fn apply(
    server: &Server<'_>,
    target: SetupTarget,
    asked: Vec<Asked>,
    args: &SetupArgs,
    stream: &StreamInfo,
    out: &mut impl Write,
) -> Result<bool, SetupError> {
    let what = match target {
        SetupTarget::Stream => format!("stream {}", server.names.stream),
        SetupTarget::Consumer => format!("consumer {}", server.names.name),
    };
    let mut settings = if asked.is_empty() { JsonSettings::new() } else { read(server, target, &what).await? };
    let asked = asked.into_iter().filter(|asked| value_of(&settings, asked.key) != asked.wanted);
    let (to_do, left): (Vec<_>, Vec<_>) = asked.partition(|asked| args.update && asked.editable);
    if to_do.is_empty() && left.is_empty() {
        match target {
            SetupTarget::Stream => {
                writeln!(out, "{what} exists for {}, left as it is", stream.config.subjects.join(", "))?;
            }
            SetupTarget::Consumer => writeln!(out, "{what} exists, left as it is")?,
        }
        return Ok(false);
    }
    for asked in &left {
        let (is, wanted) = (show(asked.key, &value_of(&settings, asked.key)), show(asked.key, &asked.wanted));
        let how = if asked.editable {
            "left as it is; repeat the command with --update to change it"
        } else {
            "left as it is; it needs a new consumer: repeat the command with --recreate"
        };
        writeln!(out, "{what} has {} {is}, asked for {wanted}: {how}", asked.key)?;
    }
    if to_do.is_empty() {
        return Ok(true);
    }
    if target == SetupTarget::Stream {
        confirm_deletions(&to_do, args, stream, out)?;
    }
    let changes: Vec<String> = to_do
        .iter()
        .map(|asked| {
            let (is, wanted) = (show(asked.key, &value_of(&settings, asked.key)), show(asked.key, &asked.wanted));
            format!("{} {is} to {wanted}", asked.key)
        })
        .collect();
    for asked in to_do {
        match asked.wanted {
            Value::Null => settings.remove(asked.key),
            wanted => settings.insert(asked.key.to_owned(), wanted),
        };
    }
    write(server, target, &what, settings).await?;
    writeln!(out, "{what} changed: {}", changes.join(", "))?;
    Ok(!left.is_empty())
}

/// A lower limit deletes messages at once, whether they are processed or not.
fn confirm_deletions(
    to_do: &[Asked],
    args: &SetupArgs,
    stream: &StreamInfo,
    out: &mut impl Write,
) -> Result<(), SetupError> {
    let state = &stream.state;
    let first = SystemTime::UNIX_EPOCH
        + Duration::from_nanos(u64::try_from(state.first_timestamp.unix_timestamp_nanos()).unwrap_or(0));
    let age = SystemTime::now().duration_since(first).unwrap_or_default();
    let is_lower = |asked: &&Asked| match (asked.key, asked.wanted.as_u64()) {
        ("max_bytes", Some(bytes)) => bytes < state.bytes,
        ("max_age", Some(ns)) => ns > 0 && state.messages > 0 && Duration::from_nanos(ns) < age,
        _ => false,
    };
    let lower: Vec<&str> = to_do.iter().filter(is_lower).map(|asked| asked.key).collect();
    if lower.is_empty() {
        return Ok(());
    }
    let name = &stream.config.name;
    let what = format!(
        "the new {} deletes messages of stream {name} that it holds now, whether they are processed or not",
        lower.join(" and ")
    );
    writeln!(out, "{what}; `order-processor status` shows how many are pending")?;
    ask(args.yes, &format!("Change stream {name}? Type its name to confirm: "), name, || what.clone())
}

async fn read(server: &Server<'_>, target: SetupTarget, what: &str) -> Result<JsonSettings, SetupError> {
    let (stream, consumer) = (&server.names.stream, &server.names.name);
    let subject = match target {
        SetupTarget::Stream => format!("STREAM.INFO.{stream}"),
        SetupTarget::Consumer => format!("CONSUMER.INFO.{stream}.{consumer}"),
    };
    let mut info = request(server, subject, &json!({}), format!("return {what}")).await?;
    match info.get_mut("config").map(Value::take) {
        Some(Value::Object(settings)) => Ok(settings),
        _ => Err(refused(format!("return {what}"), "no configuration in the answer")),
    }
}

async fn write(server: &Server<'_>, target: SetupTarget, what: &str, settings: JsonSettings) -> Result<(), SetupError> {
    let (stream, consumer) = (&server.names.stream, &server.names.name);
    let (subject, body) = match target {
        SetupTarget::Stream => (format!("STREAM.UPDATE.{stream}"), Value::Object(settings)),
        SetupTarget::Consumer => (
            format!("CONSUMER.CREATE.{stream}.{consumer}"),
            json!({ "stream_name": stream, "config": settings, "action": "update" }),
        ),
    };
    request(server, subject, &body, format!("edit {what}")).await.map(drop)
}

async fn request(server: &Server<'_>, subject: String, body: &Value, what: String) -> Result<Value, SetupError> {
    let answer = server.denials.answer(server.jetstream.request::<_, _, Response<Value>>(subject, body)).await?;
    match answer.map_err(|error| refused(what.clone(), error))? {
        Response::Ok(answer) => Ok(answer),
        Response::Err { error } => Err(beyond_limit(&what, &error)),
    }
}

/// As it was asked for, if it says the same.
fn value_of(settings: &JsonSettings, key: &str) -> Value {
    let value = settings.get(key).cloned().unwrap_or_default();
    match (key, &value) {
        // One filter stands under a name of its own.
        ("filter_subjects", Value::Null) => match settings.get("filter_subject") {
            Some(filter) => json!([filter]),
            None => Value::Null,
        },
        ("max_age" | "duplicate_window", Value::Null) => json!(0),
        ("consumer_limits", Value::Object(limits)) if limits.is_empty() => Value::Null,
        ("inactive_threshold" | "max_bytes", Value::Number(number)) if number.as_u64() == Some(0) => Value::Null,
        ("headers_only", Value::Bool(false)) => Value::Null,
        _ => value,
    }
}

fn nanoseconds(duration: Duration) -> Value {
    json!(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

fn show(key: &str, value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::Number(number) if DURATIONS.contains(&key) => match number.as_u64() {
            Some(ns) => humantime::format_duration(Duration::from_nanos(ns)).to_string(),
            None => number.to_string(),
        },
        Value::Array(items) => {
            let items: Vec<String> =
                items.iter().map(|item| item.as_str().map_or_else(|| item.to_string(), ToOwned::to_owned)).collect();
            items.join(",")
        }
        other => other.to_string(),
    }
}
