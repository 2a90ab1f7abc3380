//! Replaces the consumer without losing a message.
//!
//! The new consumer starts after the ack floor of the old one: the server delivers every message that
//! was not acknowledged there, and the database recognises the orders that it has processed. On a stream with interest retention the server deletes
//! a message as soon as no consumer waits for it. There, a second consumer, the keeper, waits for the messages between
//! the deletion and the creation.

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
    let replaced = replace(server, stream, wanted, out).await;
    if needs_keeper {
        let removed = match &replaced {
            Ok(()) => server.delete_consumer(stream, &keeper).await,
            // The consumer may be deleted, also if no answer arrived. Then only the keeper holds the messages.
            Err(_) => Ok(()),
        };
        if replaced.is_err() || removed.is_err() {
            writeln!(
                out,
                "consumer {keeper} still holds the messages; when consumer {name} exists, delete consumer {keeper} with `nats consumer \
                 rm {} {keeper}`",
                info.config.name
            )?;
        }
        removed?;
    }
    replaced?;
    writeln!(out, "consumer {name} recreated")?;
    Ok(())
}

/// Deletes the consumer and creates it. If that ends between the two, prints the command that completes it.
async fn replace(
    server: &Server<'_>,
    stream: &Stream,
    wanted: consumer::pull::Config,
    out: &mut impl Write,
) -> Result<(), SetupError> {
    let name = &server.names.name;
    server.delete_consumer(stream, name).await?;
    let complete = command(&wanted);
    if let Err(error) = server.create_consumer(stream, wanted).await {
        writeln!(out, "consumer {name} is deleted and its messages are in the stream; create it with `{complete}`")?;
        return Err(error);
    }
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
    command += &format!(" --ack-wait={}", humantime::format_duration(config.ack_wait).to_string().replace(' ', ""));
    command += &format!(" --max-ack-pending={}", config.max_ack_pending);
    if let DeliverPolicy::ByStartSequence { start_sequence } = config.deliver_policy {
        command += &format!(" --start-seq {start_sequence}");
    }
    command
}
