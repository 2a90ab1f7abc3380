//! `adopt`: records that a consumer belongs to this database, although another program has processed its orders so far.

use std::io::{self, Write};

use clap::Args;

use crate::config::Config;
use crate::jetstream;
use crate::jetstream::connection::{self, ConnectError};
use crate::jetstream::look::look_for_command;
use crate::ops::confirmed;
use crate::store::{self, Bind, Binding, OpenError, Presence, Reader, Store};
use crate::worker::message_ids;

#[derive(Debug, Args)]
pub struct AdoptArgs {
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Server(#[from] jetstream::Error),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the database failed; nothing was recorded")]
    Store(#[from] store::Error),
    #[error("nothing was recorded")]
    Declined,
    #[error("this records that orders up to message {0} are not those of this database: confirm it with --yes")]
    NotConfirmed(u64),
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Asks, then records. The daemon may run: it waits for such a record.
pub async fn run(config: &Config, args: AdoptArgs, out: &mut impl Write) -> Result<(), AdoptError> {
    // The consumer first and the database after it, as the daemon does.
    let visit = connection::connect_command(&config.nats).await?;
    let found = look_for_command(&visit, &config.consumer).await?;
    let bind = Bind::of(&config.consumer, &found.view());
    let exists = store::check(&config.database).await? == Presence::Exists;
    let record = if exists { Reader::open(&config.database).await?.binding().await? } else { None };
    let Bind { stream, consumer, .. } = &bind;
    if record.as_ref() == Some(&bind.recorded(record.as_ref())) {
        writeln!(out, "{} belongs to consumer {consumer} on stream {stream} already", config.database)?;
        return Ok(());
    }
    let adopted = bind.adopted(record.as_ref());
    if !args.yes {
        match confirmed(&question(config, &bind, record.as_ref(), &adopted), "yes")? {
            Some(true) => {}
            Some(false) => return Err(AdoptError::Declined),
            None => return Err(AdoptError::NotConfirmed(adopted.not_ours_through)),
        }
    }
    // Beside a daemon that waits for the record and has the lock.
    let mut store =
        if exists { Store::open_beside(&config.database).await? } else { Store::open(&config.database).await? };
    store.record_id_schemes(&message_ids::wanted(config)).await?;
    let adopted = store.adopt(&bind).await?;
    store.close().await?;
    writeln!(
        out,
        "{} belongs to consumer {consumer} on stream {stream} from message {} on",
        config.database,
        adopted.not_ours_through + 1
    )?;
    Ok(())
}

fn question(config: &Config, bind: &Bind, record: Option<&Binding>, adopted: &Binding) -> String {
    let Bind { stream, consumer, .. } = bind;
    let (database, through) = (&config.database, adopted.not_ours_through);
    let former = match record.and_then(|record| record.to.as_ref()) {
        Some((stream, consumer)) => format!("{database} belongs to consumer {consumer} on stream {stream}. "),
        None => String::new(),
    };
    format!(
        "{former}Record that {database} belongs to consumer {consumer} on stream {stream}, and that another program has \
         processed the orders up to message {through}? The daemon's own audit does not look at these orders. Type yes to \
         confirm: "
    )
}
