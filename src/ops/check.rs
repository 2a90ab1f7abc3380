//! `check`: whether `run` would find everything as it needs it, and what a running daemon reports of itself. Changes nothing.

use std::io::{self, Write};

use super::handler::{self, HandlerError};
use super::status;
use crate::config::Config;
use crate::handler::routes::LoadError;
use crate::jetstream::connection::CommandClient;
use crate::jetstream::gate::{self, Expectations, Severity};
use crate::jetstream::look::{Snapshot, look_for_command};
use crate::jetstream::{connection, other_pulls, permissions};
use crate::model::schemes::{IdSchemes, IdSettings};
use crate::model::text::chain;
use crate::store::{self, Bind, OpenError, Presence, Reader};
use crate::worker::message_ids;

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckResult {
    Good,
    Failed,
    /// The operator must correct something: the server rejects the login, a file of the login cannot be used, or the handler file
    /// has a problem.
    Refused,
}

/// Prints one line for each thing that was checked.
pub async fn run(config: &Config, out: &mut impl Write) -> io::Result<CheckResult> {
    let mut report = CheckReport { out, result: CheckResult::Good };
    // Wrong settings never come here: they end the program with exit code 2 and all problems at once.
    report.good("config", "every setting is valid")?;
    let (mut view, mut subjects) = (None, Vec::new());
    match connection::connect_command(&config.nats).await {
        Ok(visit) => {
            let version = visit.client.try_server_info().map_or_else(|| "unknown".to_owned(), |info| info.version);
            report.good("connection", &format!("{}, nats-server {version}", config.nats.redacted_url()))?;
            if let Some(text) = connection::announced_by_address(&config.nats, &visit.client.server_info()) {
                report.warn(&text)?;
            }
            let found = report.consumer(config, &visit).await?;
            subjects = found.as_ref().map_or_else(Vec::new, Snapshot::subjects);
            view = found.map(|found| found.view());
        }
        Err(error) => {
            report.bad("connection", &chain(&error))?;
            report.bad("consumer", "not checked: no connection to the server")?;
            if error.is_about_settings() {
                report.result = CheckResult::Refused;
            }
        }
    }
    report.handler(config, &subjects).await?;
    report.daemon(config, view.as_ref().map_or(0, |view| view.num_waiting)).await?;
    report.database(config, view.map(|view| Bind::of(&config.consumer, &view))).await?;
    match store::paused(&config.database) {
        Ok(Some(pause)) => report.warn(&format!("paused {pause}; `order-processor resume` ends it"))?,
        Ok(None) => {}
        Err(error) => report.bad("pause", &chain(&error))?,
    }
    Ok(report.result)
}

struct CheckReport<'a, W> {
    out: &'a mut W,
    result: CheckResult,
}

impl<W: Write> CheckReport<'_, W> {
    fn good(&mut self, what: &str, text: &str) -> io::Result<()> {
        writeln!(self.out, "ok    {what:<11} {text}")
    }

    fn warn(&mut self, text: &str) -> io::Result<()> {
        self.good("warning", text)
    }

    fn bad(&mut self, what: &str, text: &str) -> io::Result<()> {
        if self.result == CheckResult::Good {
            self.result = CheckResult::Failed;
        }
        writeln!(self.out, "FAIL  {what:<11} {text}")
    }

    /// What the server reports of the consumer, if there is one.
    async fn consumer(&mut self, config: &Config, visit: &CommandClient) -> io::Result<Option<Snapshot>> {
        let found = match look_for_command(visit, &config.consumer).await {
            Ok(found) => found,
            Err(error) => return self.bad("consumer", &chain(&error)).map(|()| None),
        };
        let findings = gate::examine(&found.stream, &found.consumer, Expectations::of(config));
        if findings.iter().all(|finding| finding.severity == Severity::Warned) {
            self.good("consumer", &format!("{} on {}", config.consumer.name, config.consumer.stream))?;
        }
        for finding in findings {
            match finding.severity {
                Severity::Refused => self.bad("consumer", &finding.text)?,
                Severity::Warned => self.warn(&finding.text)?,
            }
        }
        for warning in gate::unauditable(&found.stream).into_iter().chain(gate::lost_origins(&found.stream)) {
            self.warn(&warning)?;
        }
        let pull = permissions::to_pull(visit, &config.consumer).await;
        let acknowledge = permissions::to_acknowledge(visit, &config.consumer).await;
        let subscribe = permissions::to_subscribe(visit, config).await;
        if pull.is_ok() && acknowledge.is_ok() && subscribe.is_ok() {
            self.good("permissions", "to pull and to acknowledge")?;
        }
        for (what, tried) in [("pull", pull), ("acknowledge", acknowledge), ("subscribe", subscribe)] {
            if let Err(error) = tried {
                self.bad("permissions", &format!("to {what}: {}", chain(&error)))?;
            }
        }
        Ok(Some(found))
    }

    /// The handler file, checked with the schema of the database.
    async fn handler(&mut self, config: &Config, subjects: &[String]) -> io::Result<()> {
        let Some(file) = &config.handler.file else { return Ok(()) };
        match handler::load(config, file, Some(&config.database)).await {
            Ok(routes) => {
                self.good("handler", &routes.summary())?;
                routes.without_route(subjects).iter().try_for_each(|subject| {
                    self.warn(&format!(
                        "{} has no route that takes every order with subject {subject}; an order without a route becomes a dead \
                         letter with the reason unrouted",
                        file.display()
                    ))
                })
            }
            Err(error @ HandlerError::Load(LoadError::Problems(_))) => {
                error.to_string().lines().try_for_each(|problem| self.bad("handler", problem))?;
                self.result = CheckResult::Refused;
                Ok(())
            }
            // The database has its own line.
            Err(error) => self.bad("handler", &format!("not checked: {}", chain(&error))),
        }
    }

    /// A daemon that runs knows more than a look from outside.
    async fn daemon(&mut self, config: &Config, num_waiting: u64) -> io::Result<()> {
        let daemon = match status::daemon(config.http.listen).await {
            Ok(daemon) => daemon,
            Err(problem) => return self.bad("daemon", &problem),
        };
        if let Some(daemon) = &daemon {
            let mut problems = daemon.unwanted_problems().peekable();
            if problems.peek().is_none() {
                self.good("daemon", "runs and reports no problem")?;
            }
            for problem in problems {
                self.bad("daemon", &format!("is not ready: {problem}"))?;
            }
        }
        let counted = daemon.as_ref().map(|daemon| daemon.other_pulls);
        match other_pulls::warning_of_a_command(&config.consumer.name, num_waiting, counted) {
            Some(warning) => self.warn(&warning),
            None => Ok(()),
        }
    }

    /// How ids are made, and whether the next start changes it.
    async fn message_ids(&mut self, config: &Config) -> io::Result<()> {
        let settings = message_ids::wanted(config);
        match id_schemes(config, &settings).await {
            Ok(None) => Ok(()),
            Ok(Some(schemes)) => {
                self.good("ids", &message_ids::history(&schemes))?;
                match message_ids::difference(&schemes, &settings) {
                    Some(difference) => self.warn(&difference),
                    None => Ok(()),
                }
            }
            Err(error) => self.bad("ids", &error),
        }
    }

    async fn database(&mut self, config: &Config, bind: Option<Bind>) -> io::Result<()> {
        let database = &config.database;
        let (presence, holder) = (store::check(database).await, store::holder(database));
        // A file that is gone while a daemon uses it is a worse problem, with another remedy.
        let is_gone = matches!((&presence, &holder), (Ok(Presence::WillBeCreated), Ok(Some(_))));
        if let (Ok(presence), Some(bind), false) = (&presence, bind, is_gone)
            && let Err(refusal) = judge(config, *presence, &bind).await
        {
            return self.bad("database", &refusal);
        }
        match (presence, holder) {
            (Err(error), _) | (Ok(_), Err(error)) => self.bad("database", &chain(&error)),
            (Ok(Presence::Exists), Ok(_)) => {
                self.good("database", &database.to_string())?;
                self.message_ids(config).await
            }
            (Ok(Presence::WillBeCreated), Ok(None)) => self.good("database", &format!("{database} will be created")),
            (Ok(Presence::WillBeCreated), Ok(Some(holder))) => self.bad(
                "database",
                &format!(
                    "{database} does not exist any longer, but {holder} uses it: put the file back, or restore a backup"
                ),
            ),
        }
    }
}

/// How the database records that ids are made. `None` if it records nothing yet.
async fn id_schemes(config: &Config, settings: &IdSettings) -> Result<Option<IdSchemes>, String> {
    match Reader::open(&config.database).await {
        Ok(mut reader) => reader.id_schemes(settings).await.map_err(|error| chain(&error)),
        Err(OpenError::Older(_)) => Ok(None),
        Err(error) => Err(chain(&error)),
    }
}

/// Whether the database belongs to the consumer.
async fn judge(config: &Config, presence: Presence, bind: &Bind) -> Result<(), String> {
    let judged = match presence {
        Presence::WillBeCreated => bind.judge(None, &[]),
        Presence::Exists => match Reader::open(&config.database).await {
            Ok(mut reader) => reader.judge(bind).await.map_err(|error| chain(&error))?,
            // The daemon updates the schema first, and this command changes nothing.
            Err(OpenError::Older(_)) => Ok(()),
            Err(error) => return Err(chain(&error)),
        },
    };
    judged.map_err(|refusal| format!("{}: {refusal}", config.database))
}
