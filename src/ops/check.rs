//! `check`: whether `run` would find everything as it needs it. Changes nothing.

use std::io::{self, Write};

use crate::config::Config;
use crate::jetstream::gate::{self, Expectations, Severity};
use crate::jetstream::{connection, consumer, permissions};
use crate::model::text::chain;
use crate::store::{self, Presence};

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Good,
    Failed,
    /// The settings, or the files that they name, do not open the door.
    LockedOut,
}

/// Prints one line for each thing looked at.
pub async fn run(config: &Config, out: &mut impl Write) -> io::Result<Verdict> {
    let mut all_good = true;
    let mut locked_out = false;
    let mut say = |good: bool, what: &str, text: &str| {
        all_good &= good;
        writeln!(out, "{:<5} {what:<11} {text}", if good { "ok" } else { "FAIL" })
    };
    // Wrong settings never come here: they end the program with exit code 2 and all problems at once.
    say(true, "config", "every setting is valid")?;
    match connection::visit(&config.nats).await {
        Ok(visit) => {
            let version = visit.client.try_server_info().map_or_else(|| "unknown".to_owned(), |info| info.version);
            say(true, "connection", &format!("{}, nats-server {version}", config.nats.redacted_url()))?;
            match consumer::visit(&visit, &config.consumer).await {
                Ok(found) => {
                    let findings = gate::examine(&found.stream, &found.consumer, Expectations::of(config));
                    if findings.iter().all(|finding| finding.severity == Severity::Warned) {
                        let (stream, consumer) = (&config.consumer.stream, &config.consumer.name);
                        say(true, "consumer", &format!("{consumer} on {stream}"))?;
                    }
                    for finding in findings {
                        match finding.severity {
                            Severity::Refused => say(false, "consumer", &finding.text)?,
                            Severity::Warned => say(true, "warning", &finding.text)?,
                        }
                    }
                    let mut permitted = true;
                    let pull = permissions::to_pull(&visit, &config.consumer).await;
                    let acknowledge = permissions::to_acknowledge(&visit, &config.consumer).await;
                    for (what, tried) in [("pull", pull), ("acknowledge", acknowledge)] {
                        if let Err(error) = tried {
                            permitted = false;
                            say(false, "permissions", &format!("to {what}: {}", chain(&error)))?;
                        }
                    }
                    if permitted {
                        say(true, "permissions", "to pull and to acknowledge")?;
                    }
                }
                Err(error) => say(false, "consumer", &chain(&error))?,
            }
        }
        Err(error) => {
            locked_out = error.is_about_settings();
            say(false, "connection", &chain(&error))?;
            say(false, "consumer", "not looked at without a connection")?;
        }
    }
    match store::check(&config.database).await {
        Ok(Presence::Exists) => say(true, "database", &config.database.to_string())?,
        Ok(Presence::WillBeCreated) => say(true, "database", &format!("{} will be created", config.database))?,
        Err(error) => say(false, "database", &chain(&error))?,
    }
    match store::paused(&config.database) {
        Ok(Some(pause)) => say(true, "warning", &format!("paused {pause}; `order-processor resume` ends it"))?,
        Ok(None) => {}
        Err(error) => say(false, "pause", &chain(&error))?,
    }
    Ok(match (locked_out, all_good) {
        (true, _) => Verdict::LockedOut,
        (false, false) => Verdict::Failed,
        (false, true) => Verdict::Good,
    })
}
