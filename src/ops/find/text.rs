//! How the answer is printed: the verdict, the timeline, what to do next, and what was not asked. Ids, subjects and errors come from
//! publishers: nothing of them may drive a terminal.

use std::io;

use serde_json::json;

use super::judge::{DaemonState, OrderFacts, OrderVerdict};
use crate::model::delivery::Headers;
use crate::model::id::{IdScheme, UniqueIn};
use crate::model::letter::Envelope;
use crate::model::plan::Plan;
use crate::model::text::{self, printable, shortened};
use crate::model::time::{millis_text, nanos_text};

/// Characters of one field. A command that is printed fits: it has its id two times at most, each at most this long in a shell.
const FIELD_MAX: usize = 1000;
const COMMAND_ID_MAX: usize = 400;

/// One thing that happened to the order, or that waits.
struct TimelineEvent {
    at_ns: Option<i64>,
    what: &'static str,
    text: String,
}

/// The answer for people.
pub fn lines(facts: &OrderFacts, verdict: &OrderVerdict) -> String {
    let mut lines = String::new();
    let mut row = |name: &str, value: &str| lines.push_str(&format!("{name:<13} {}\n", shortened(value, FIELD_MAX)));
    row("verdict", &summary(facts, verdict));
    if let Some(id) = &facts.id {
        row("id", id);
    }
    for event in timeline(facts) {
        let at = event.at_ns.map_or_else(|| "not known".to_owned(), millis_text);
        row(event.what, &format!("{at:<24}  {}", event.text));
    }
    if let Some(floor) = floor(facts) {
        row("ack floor", &floor);
    }
    row("daemon", &daemon(&facts.daemon));
    if let Some(trace_id) = trace_id(facts) {
        row("trace", trace_id);
    }
    for note in &facts.notes {
        row("note", note);
    }
    for next in next(facts, verdict) {
        row("next", &next);
    }
    for source in &facts.not_asked {
        row("not asked", source);
    }
    lines
}

/// The same for scripts, on one line. Texts are whole.
pub fn json_line(facts: &OrderFacts, verdict: &OrderVerdict) -> io::Result<String> {
    let events = timeline(facts);
    let event =
        |event: &TimelineEvent| json!({"at": event.at_ns.map(nanos_text), "event": event.what, "text": event.text});
    let view = facts.server.as_ref().map(|server| &server.view);
    let mut answer = json!({
        "verdict": verdict.name(),
        "applied": verdict.is_applied(),
        "summary": summary(facts, verdict),
        "id": facts.id,
        "stream": facts.stream,
        "stream_seq": facts.seq.or_else(|| facts.recorded_message().map(|(seq, _)| seq)),
        "timeline": events.iter().map(event).collect::<Vec<_>>(),
        "ack_floor_stream_seq": view.map(|view| view.ack_floor_stream_seq),
        "last_stream_seq": view.map(|view| view.stream_last_seq),
        "daemon": daemon(&facts.daemon),
        "trace_id": trace_id(facts),
        "notes": facts.notes,
        "next": next(facts, verdict),
        "not_asked": facts.not_asked,
    });
    match verdict {
        OrderVerdict::DeadLetter { reason, error } => {
            (answer["reason"], answer["error"]) = (json!(reason), json!(error))
        }
        OrderVerdict::Replayed { by, applied_id } => {
            (answer["by"], answer["applied_id"]) = (json!(by), json!(applied_id))
        }
        OrderVerdict::Applied { other_id: Some(id) } => answer["applied_id"] = json!(id),
        OrderVerdict::Discarded { by } => answer["by"] = json!(by),
        OrderVerdict::Retrying { attempt, max_attempts } => {
            (answer["attempt"], answer["max_attempts"]) = (json!(attempt), json!(max_attempts));
        }
        OrderVerdict::Waiting { before, exact } => (answer["before"], answer["exact"]) = (json!(before), json!(exact)),
        OrderVerdict::Applied { other_id: None }
        | OrderVerdict::Dropped
        | OrderVerdict::Ignored(_)
        | OrderVerdict::NotForTheConsumer
        | OrderVerdict::Delivered
        | OrderVerdict::InOutbox { .. }
        | OrderVerdict::Missing(_)
        | OrderVerdict::Undetermined(_)
        | OrderVerdict::NotFound => {}
    }
    Ok(text::json(&answer)? + "\n")
}

fn summary(facts: &OrderFacts, verdict: &OrderVerdict) -> String {
    match verdict {
        OrderVerdict::Applied { other_id: None } => "applied".to_owned(),
        OrderVerdict::Applied { other_id: Some(id) } => format!("applied, under another id: {id}"),
        OrderVerdict::Replayed { by, applied_id } if facts.id.as_ref().is_none_or(|id| id == applied_id) => {
            format!("applied: replayed by {by}")
        }
        OrderVerdict::Replayed { by, applied_id } => format!("applied: replayed by {by} under the id {applied_id}"),
        OrderVerdict::DeadLetter { reason, error } => format!("dead letter, {reason}: {error}"),
        OrderVerdict::Discarded { by } => format!("not applied: discarded by {by}"),
        OrderVerdict::Dropped => {
            "not applied: its id was used before, and inbox.on_conflict = \"duplicate\" drops such orders".to_owned()
        }
        OrderVerdict::Ignored(why) => format!("ignored: {why}"),
        OrderVerdict::NotForTheConsumer => {
            "not for the consumer: its filter or its start excludes the message".to_owned()
        }
        OrderVerdict::Retrying { attempt, max_attempts } => format!("retrying, attempt {attempt} of {max_attempts}"),
        OrderVerdict::Delivered => "delivered and not decided".to_owned(),
        OrderVerdict::Waiting { before: 0, .. } => "waits in the stream, and is the next one".to_owned(),
        OrderVerdict::Waiting { before, exact } => {
            format!("waits in the stream, {}{before} before it", if *exact { "" } else { "at most " })
        }
        OrderVerdict::InOutbox { row } => format!("not published yet: row {row} of the outbox has this id"),
        OrderVerdict::Missing(why) => format!("missing: the ack floor has passed the message, and it is {why}"),
        OrderVerdict::Undetermined(why) => {
            format!("not known: the ack floor has passed the message, it is in no table, and {why}")
        }
        OrderVerdict::NotFound => not_found(facts),
    }
}

fn not_found(facts: &OrderFacts) -> String {
    let view = facts.server.as_ref().map(|server| &server.view);
    match (facts.seq, view) {
        (Some(_), Some(view)) if is_beyond_the_last(facts) => {
            format!("not found: the last message of the stream is {}", view.stream_last_seq)
        }
        (Some(_), _) if facts.is_gone => {
            "not found: the stream no longer has the message, and no table has its sequence".to_owned()
        }
        (Some(_), _) => "not found: no table has the sequence".to_owned(),
        (None, _) if facts.was_scanned => "not found: no table and no message of the stream has the id".to_owned(),
        (None, Some(_)) if facts.not_asked.is_empty() => {
            "not found: no table has the id, and no message above the ack floor".to_owned()
        }
        (None, _) => "not found: no table has the id".to_owned(),
    }
}

/// What happened, the earliest first.
fn timeline(facts: &OrderFacts) -> Vec<TimelineEvent> {
    let mut events = Vec::new();
    let mut add =
        |at_ns: Option<i64>, what: &'static str, text: String| events.push(TimelineEvent { at_ns, what, text });
    if let Some(message) = &facts.message {
        let (raw, position) = (&message.raw, message.raw.position);
        let (stream, bytes) = (&facts.stream, raw.payload.len());
        let text = format!("message {} of {stream}, subject {}, {bytes} bytes", position.stream_seq, raw.subject);
        add(Some(position.published_ns), "published", text);
    }
    if let Some(row) = &facts.record.processed {
        let mut text = format!("message {}, digest {}", row.stream_seq, row.digest);
        if facts.digest.is_some_and(|digest| digest != row.digest) {
            text += ", another order under this id";
        }
        let is_ignored = facts.message.as_ref().is_some_and(|message| message.plan == Plan::Ignore);
        add(Some(row.processed_at_ns), if is_ignored { "claimed" } else { "applied" }, text);
    }
    if let Some((id, record)) = &facts.other_id
        && let Some(row) = &record.processed
    {
        add(Some(row.processed_at_ns), "applied", format!("message {}, under the id {id}", row.stream_seq));
    }
    if let Some(attempts) = &facts.record.attempts {
        let (failed, started) = (attempts.attempts.failed, attempts.attempts.started);
        if failed > 0 {
            let error = attempts.last_error.as_deref().unwrap_or("no error is recorded");
            add(Some(attempts.updated_at_ns), "failed", format!("attempt {failed} of {}: {error}", facts.max_attempts));
        }
        if started > 0 {
            let text = format!("{started} runs of the handler began and have not ended");
            add(Some(attempts.updated_at_ns), "started", text);
        }
    }
    facts.record.letters.iter().for_each(|letter| add_letter(facts, letter, &mut add));
    for row in &facts.record.outbox {
        let text = format!("row {}, id {}, subject {}, waits to be published", row.row, row.id, row.subject);
        add(Some(row.created_at_ns), "outbox", text);
    }
    events.sort_by_key(|event| event.at_ns);
    events
}

fn add_letter(facts: &OrderFacts, letter: &Envelope, add: &mut impl FnMut(Option<i64>, &'static str, String)) {
    let is_other = facts.digest.is_some_and(|meant| meant != letter.digest);
    let other = if is_other { ", another order under this id" } else { "" };
    let is_shown = facts.message.as_ref().is_some_and(|message| message.raw.position.stream_seq == letter.stream_seq);
    if !is_shown && letter.published_ns.is_some() {
        let (seq, subject, bytes) = (letter.stream_seq, &letter.subject, letter.payload_bytes);
        add(letter.published_ns, "published", format!("message {seq}, subject {subject}, {bytes} bytes{other}"));
    }
    let Envelope { stream_seq, digest, reason, error, .. } = letter;
    add(
        Some(letter.dead_at_ns),
        "dead letter",
        format!("message {stream_seq}, digest {digest}{other}, {reason}: {error}"),
    );
    if let Some(closed) = &letter.closed {
        let applied_id = closed.applied_id.as_ref().filter(|id| **id != letter.id);
        let under = applied_id.map_or_else(String::new, |id| format!(" under the id {id}"));
        add(Some(closed.at_ns), closed.closing.name(), format!("message {stream_seq}, by {}{under}", closed.by));
    }
}

/// Where the consumer stands.
fn floor(facts: &OrderFacts) -> Option<String> {
    let server = facts.server.as_ref()?;
    let (view, settled) = (&server.view, server.settled);
    let seq = facts.seq.or_else(|| facts.recorded_message().map(|(seq, _)| seq));
    let passed = match seq {
        Some(seq) if seq <= settled => format!(": the consumer has passed message {seq}"),
        Some(seq) if seq <= view.delivered_stream_seq => format!(": message {seq} is delivered"),
        Some(_) | None => String::new(),
    };
    Some(format!("{settled} of {}{passed}", view.stream_last_seq))
}

fn daemon(daemon: &DaemonState) -> String {
    match daemon {
        DaemonState::Runs { health, .. } => health.clone(),
        DaemonState::Paused(by) => format!("paused {by}"),
        DaemonState::Stopped(listen) => format!("not running: nothing listens on {listen}"),
        DaemonState::Unknown => "not known".to_owned(),
    }
}

/// What to do, the first thing first.
fn next(facts: &OrderFacts, verdict: &OrderVerdict) -> Vec<String> {
    let mut next = Vec::new();
    if verdict.is_pending() {
        next.extend(match &facts.daemon {
            DaemonState::Paused(_) => Some("`order-processor resume` ends the pause".to_owned()),
            DaemonState::Stopped(_) => Some("start the daemon, or look on the machine where it runs".to_owned()),
            DaemonState::Runs { ready: false, .. } => Some("correct what keeps the daemon from being ready".to_owned()),
            DaemonState::Runs { ready: true, .. } | DaemonState::Unknown => None,
        });
        if facts.server.as_ref().is_some_and(|server| server.view.paused) {
            next.push("the consumer is paused on the server: `nats consumer resume` ends that".to_owned());
        }
    }
    let desk = |command: &str| format!("order-processor dead-letters {command} {}", command_id(facts.id.as_deref()));
    match verdict {
        OrderVerdict::DeadLetter { reason, .. } => {
            next.push(desk("show"));
            next.extend(match reason.as_str() {
                "conflict" => [
                    format!("if it repeats the earlier order: {}", desk("discard")),
                    format!("if it is a separate order: {} --as-new", desk("replay")),
                ],
                _ => [
                    format!("after the cause is corrected: {}", desk("replay")),
                    format!("if it must not be applied: {}", desk("discard")),
                ],
            });
        }
        OrderVerdict::Discarded { .. } => next.push(desk("show")),
        OrderVerdict::Retrying { max_attempts, .. } => {
            next.push(format!(
                "correct the cause of the error: after {max_attempts} attempts the order is a dead letter"
            ));
        }
        OrderVerdict::Missing(_) => {
            next.push("order-processor pause && order-processor audit --repair && order-processor resume".to_owned());
        }
        OrderVerdict::Undetermined(_) => {
            next.push("look for the effect of the order: `order-processor audit` does not know either".to_owned())
        }
        OrderVerdict::NotFound => next.extend(after_not_found(facts)),
        OrderVerdict::Applied { .. }
        | OrderVerdict::Replayed { .. }
        | OrderVerdict::Dropped
        | OrderVerdict::Ignored(_)
        | OrderVerdict::NotForTheConsumer
        | OrderVerdict::Delivered
        | OrderVerdict::Waiting { .. }
        | OrderVerdict::InOutbox { .. } => {}
    }
    next
}

fn after_not_found(facts: &OrderFacts) -> Vec<String> {
    let mut next = Vec::new();
    let Some(id) = facts.id.as_deref().filter(|_| facts.seq.is_none()) else {
        if facts.is_gone && !is_beyond_the_last(facts) {
            next.push("the order may have been applied: its id may be deleted (inbox.retention)".to_owned());
        }
        return next;
    };
    next.extend(
        with_scope(&facts.scheme, &facts.stream, id).map(|example| {
            format!("ids of this stream have a scope, for example {example}; `find` needs the whole id")
        }),
    );
    if facts.server.is_some() && !facts.was_scanned {
        next.push(format!("order-processor find --scan {}", command_id(Some(id))));
    }
    next
}

/// The ids that a publisher may have meant by `id`, if the scheme puts a scope before it; `None` if `id` may have one.
fn with_scope(scheme: &IdScheme, stream: &str, id: &str) -> Option<String> {
    let has_pointer = scheme.pointer.is_some() && !id.contains(' ');
    match &scheme.unique_in {
        UniqueIn::Subject if has_pointer => Some(format!("\"{stream}.new {id}\"")),
        UniqueIn::Stream if has_pointer => Some(format!("\"{} {id}\"", scheme.stream)),
        UniqueIn::Header(name) if !id.starts_with(&format!("{name}=")) => {
            Some(format!("\"{name}=VALUE:{id}\" or \"{name}=VALUE {id}\""))
        }
        UniqueIn::Subject | UniqueIn::Stream | UniqueIn::Header(_) => None,
    }
}

fn is_beyond_the_last(facts: &OrderFacts) -> bool {
    let last = facts.server.as_ref().map(|server| server.view.stream_last_seq);
    facts.seq.zip(last).is_some_and(|(seq, last)| seq > last)
}

/// An id as a shell takes it, or `ID` where that is not possible on a line that is safe to copy.
fn command_id(id: Option<&str>) -> String {
    let Some(id) = id.filter(|id| printable(id) == *id) else { return "ID".to_owned() };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@/+=,".contains(c);
    let dashes = if id.starts_with('-') { "-- " } else { "" };
    let quoted = if id.chars().all(is_plain) { id.to_owned() } else { format!("'{}'", id.replace('\'', "'\\''")) };
    if quoted.chars().count() <= COMMAND_ID_MAX { dashes.to_owned() + &quoted } else { "ID".to_owned() }
}

/// The trace that the publisher began (W3C trace context).
fn trace_id(facts: &OrderFacts) -> Option<&str> {
    let headers: &Headers = &facts.message.as_ref()?.raw.headers;
    let (_, value) = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("traceparent"))?;
    let trace_id = value.split('-').nth(1)?;
    let is_id = trace_id.len() == 32
        && trace_id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        && trace_id.bytes().any(|byte| byte != b'0');
    is_id.then_some(trace_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_command_is_safe_to_copy() {
        for (id, shown) in [
            ("o-1", "o-1"),
            ("ORDERS.new 4711", "'ORDERS.new 4711'"),
            ("-x", "-- -x"),
            ("a'; rm -rf /", "'a'\\''; rm -rf /'"),
            ("a\nb", "ID"),
            ("\u{202e}a", "ID"),
        ] {
            assert_eq!(command_id(Some(id)), shown);
        }
        assert_eq!(command_id(Some(&"x".repeat(401))), "ID");
        assert_eq!(command_id(None), "ID");
    }
}
