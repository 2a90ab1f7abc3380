//! Replaces the consumer without losing a message.
//!
//! The new consumer starts after the ack floor of the old one: every message that the old one had not seen acknowledged comes
//! again, and the database recognises the orders that it has processed. On a stream with interest retention the server deletes
//! a message as soon as no consumer waits for it. There, a keeper waits for the messages while the consumer is away.

use std::collections::HashMap;
use std::io::Write;

use async_nats::jetstream::consumer::{self, DeliverPolicy, Info as ConsumerInfo};
use async_nats::jetstream::stream::{Info as StreamInfo, RetentionPolicy, Stream};

use super::{Server, SetupArgs, SetupError, wanted_consumer};
use crate::jetstream::deletion;
use crate::ops::teardown::ask;

pub(super) async fn run(
    server: &Server<'_>,
    stream: &Stream,
    old: &ConsumerInfo,
    args: &SetupArgs,
    out: &mut impl Write,
) -> Result<(), SetupError> {
    let (name, info) = (&server.names.name, stream.cached_info());
    let wanted = wanted_consumer(name, args, Some(old), stream)?;
    writeln!(
        out,
        "consumer {name} will be deleted and created again: filter {}, deliver policy {}, ack_wait {}, max_ack_pending {}; no other \
         setting is kept",
        shown(&wanted),
        deletion::policy(&wanted.deliver_policy),
        humantime::format_duration(wanted.ack_wait),
        wanted.max_ack_pending
    )?;
    writeln!(
        out,
        "{} messages wait for it ({} not delivered, {} not acknowledged); none of them is lost",
        deletion::waiting(old),
        old.num_pending,
        old.num_ack_pending
    )?;
    ask(args.yes, &format!("Recreate consumer {name}? Type its name to confirm: "), name, || {
        format!("this deletes and recreates consumer {name} of stream {}", info.config.name)
    })?;
    let keeper = format!("{name}-keeper");
    let needs_keeper = info.config.retention == RetentionPolicy::Interest;
    if needs_keeper {
        let config = consumer::pull::Config { durable_name: Some(keeper.clone()), ..wanted.clone() };
        server.create_consumer(stream, config).await?;
    }
    server.delete_consumer(stream, name).await?;
    if let Err(error) = server.create_consumer(stream, wanted.clone()).await {
        writeln!(out, "consumer {name} is deleted; create it with `{}`", command(&wanted))?;
        if needs_keeper {
            writeln!(out, "consumer {keeper} keeps its messages; delete consumer {keeper} afterwards")?;
        }
        return Err(error);
    }
    if needs_keeper {
        server.delete_consumer(stream, &keeper).await?;
    }
    writeln!(out, "consumer {name} recreated")?;
    Ok(())
}

/// Where the new consumer starts.
pub(super) fn position(stream: &StreamInfo, old: &ConsumerInfo) -> DeliverPolicy {
    let floor = old.ack_floor.stream_sequence;
    // A work queue takes no other policy, and holds no acknowledged message.
    if stream.config.retention == RetentionPolicy::WorkQueue {
        return DeliverPolicy::All;
    }
    // A stream that lost its end gives sequences below the floor to new messages.
    if floor == 0 || floor > stream.state.last_sequence {
        return DeliverPolicy::All;
    }
    DeliverPolicy::ByStartSequence { start_sequence: floor + 1 }
}

/// Without what the server itself has noted there.
pub(super) fn metadata(old: &consumer::Config) -> HashMap<String, String> {
    let own = old.metadata.iter().filter(|(key, _)| !key.starts_with("_nats."));
    own.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn filters(config: &consumer::pull::Config) -> Vec<String> {
    if config.filter_subject.is_empty() { config.filter_subjects.clone() } else { vec![config.filter_subject.clone()] }
}

fn shown(config: &consumer::pull::Config) -> String {
    let filters = filters(config);
    if filters.is_empty() { "none".to_owned() } else { filters.join(", ") }
}

/// What creates this consumer.
fn command(config: &consumer::pull::Config) -> String {
    let mut command = "order-processor setup".to_owned();
    let filters = filters(config);
    if !filters.is_empty() {
        command += &format!(" --filter '{}'", filters.join(","));
    }
    if let DeliverPolicy::ByStartSequence { start_sequence } = config.deliver_policy {
        command += &format!(" --start-seq {start_sequence}");
    }
    command
}
