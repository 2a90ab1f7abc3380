//! Whether the database belongs to the consumer: asked at every bind, before anything is pulled, applied or acknowledged.

use crate::config;
use crate::model::view::ConsumerView;
use crate::store::{Bind, Unbound};
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

/// The answer of the database to the newest bind.
#[derive(Default)]
pub struct Acceptance {
    state: State,
    /// A database has accepted a bind of this worker.
    before: bool,
    reminder: Reminder,
}

#[derive(Default)]
enum State {
    /// There was no bind yet.
    #[default]
    Never,
    /// The database must be asked.
    Due(Bind),
    /// The database is asked again at every look at the consumer: an operator may correct what is wrong.
    Refused,
    Accepted,
}

impl Acceptance {
    /// The daemon has bound to the consumer.
    pub fn ask(&mut self, names: &config::ConsumerNames, view: &ConsumerView) {
        self.state = State::Due(Bind::of(names, view));
    }

    /// A fresh look at the consumer.
    pub fn observe(&mut self, names: &config::ConsumerNames, view: &ConsumerView) {
        if matches!(self.state, State::Refused) {
            self.ask(names, view);
        }
    }

    /// What the database must be asked now.
    pub fn due(&self) -> Option<Bind> {
        match &self.state {
            State::Due(bind) => Some(bind.clone()),
            State::Never | State::Refused | State::Accepted => None,
        }
    }

    /// Whether messages may be pulled and applied.
    pub fn is_accepted(&self) -> bool {
        matches!(self.state, State::Accepted)
    }

    /// Takes the answer.
    ///
    /// # Errors
    /// The refusal of the first bind: a restart does not help. A later one is reported, and the daemon waits.
    pub fn take_answer(
        &mut self,
        asked: &Bind,
        answer: Result<(), Unbound>,
        telemetry: &Telemetry,
    ) -> Result<(), Unbound> {
        match answer {
            // There was another bind meanwhile.
            _ if self.due().as_ref() != Some(asked) => {}
            Ok(()) => {
                self.state = State::Accepted;
                self.before = true;
                self.reminder.forget();
            }
            Err(refusal) if !self.before => return Err(refusal),
            Err(refusal) => {
                self.state = State::Refused;
                let cause = refusal.to_string();
                if self.reminder.is_due(&cause) {
                    tracing::error!(%cause, "nothing is processed: the database and the consumer do not belong together");
                }
                telemetry.health.report(Component::Database, Err(cause));
            }
        }
        Ok(())
    }
}
