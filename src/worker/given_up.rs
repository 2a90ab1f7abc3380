//! When to look for the messages that the server has given up, and what follows from what a [survey](crate::survey) found.

use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Duration, Instant};

use crate::consumer::Arrival;
use crate::delivery::Reply;
use crate::errors::chain;
use crate::health::ConsumerView;
use crate::survey::{Conclusion, Survey, SurveyError, Surveyed};
use crate::telemetry::Reminder;

/// Until a search that could not conclude is tried again with the same figures.
const AGAIN: Duration = Duration::from_secs(10);
/// And until one is repeated that somebody has to look into: with a repaired database it has another result.
const REMINDS: Duration = Duration::from_secs(600);

/// The search for messages that the server has given up.
#[derive(Default)]
pub struct GivenUp {
    survey: Option<Running>,
    /// There was one since the start.
    begun: bool,
    /// How many the server had given up by its own figures when we last looked for them.
    looked_into: u64,
    /// How many they were when we acknowledged all that was processed, in case it was among them.
    acknowledged: Option<u64>,
    /// The next look brings another survey: for the rest, or to see what the acknowledgements made of the figures.
    go_on: bool,
    /// The last one could not conclude.
    again_at: Option<Instant>,
    reminder: Reminder,
}

type Running = JoinHandle<Result<Surveyed, SurveyError>>;
/// What came of a step on its task.
pub type Ended = Result<Result<Surveyed, SurveyError>, JoinError>;

/// What the worker is to do after a step.
#[derive(Default)]
pub struct ToDo {
    /// These were processed, and the server may not know.
    pub acknowledge: Vec<Reply>,
    /// And this look needs them to have arrived.
    pub with_receipt: bool,
    /// These are lost unless they are taken in.
    pub take_in: Vec<Arrival>,
}

impl GivenUp {
    /// The step that is under way.
    pub fn running(&mut self) -> Option<&mut Running> {
        self.survey.as_mut()
    }

    /// Nothing is under way or about to be.
    pub fn is_at_rest(&self) -> bool {
        self.survey.is_none() && !self.go_on
    }

    /// What could not be found over the last connection may be found over this one.
    pub fn bound(&mut self) {
        self.looked_into = 0;
    }

    /// Begins a survey if this look at the consumer calls for one, and there is the way to do it.
    pub fn seen(&mut self, view: &ConsumerView, max_deliver: Option<u64>, survey: impl FnOnce() -> Option<Survey>) {
        let evidence = Survey::evidence(view);
        self.looked_into = self.looked_into.min(evidence);
        if evidence == 0 {
            (self.go_on, self.again_at, self.acknowledged) = (false, None, None);
        }
        // At the start, before anything of ours is pending, the figures tell less than they could.
        let at_start = !self.begun && max_deliver.is_some() && view.num_redelivered > 0;
        let again = self.go_on || self.again_at.is_some_and(|at| at <= Instant::now());
        if (at_start || again || evidence > self.looked_into)
            && self.survey.is_none()
            && let Some(survey) = survey()
        {
            self.begun = true;
            self.looked_into = evidence;
            self.again_at = None;
            self.go_on = false;
            self.survey = Some(tokio::spawn(survey.run()));
        }
    }

    /// Draws the conclusions from a step.
    pub fn surveyed(&mut self, ended: Ended) -> ToDo {
        self.survey = None;
        let Surveyed { processed, evidence, pending, conclusion } = match ended {
            Ok(Ok(surveyed)) => surveyed,
            Ok(Err(error)) => {
                self.failed(&error);
                return ToDo::default();
            }
            Err(error) => {
                self.again_at = Some(Instant::now() + AGAIN);
                tracing::error!(%error, "the search for messages that the server has given up has failed");
                return ToDo::default();
            }
        };
        let unknown_to_the_server = self.acknowledged != Some(evidence);
        let acknowledge = if unknown_to_the_server { processed } else { Vec::new() };
        let (arrivals, lost, from, to) = match conclusion {
            Conclusion::GoOn(survey) => {
                self.survey = Some(tokio::spawn(survey.run()));
                return ToDo { acknowledge, ..ToDo::default() };
            }
            Conclusion::Done { arrivals, lost, from, to } => (arrivals, lost, from, to),
        };
        if !acknowledge.is_empty() {
            // Some of it may be what was given up. Once the server knows what was processed its figure is that of the lost ones.
            self.acknowledged = Some(evidence);
            self.go_on = true;
            return ToDo { acknowledge, with_receipt: true, ..ToDo::default() };
        }
        if lost < evidence && pending {
            self.again_at = Some(Instant::now() + AGAIN);
        } else if lost < evidence {
            self.again_at = Some(Instant::now() + REMINDS);
            let cause = format!("messages {from} to {to}");
            if self.reminder.is_due(&cause) {
                tracing::error!(
                    given_up = evidence,
                    found = lost,
                    "the server has given up more messages than can be found among messages {from} to {to}: their ids may be \
                     pruned, or they are from before the consumer's start; see `order-processor audit`"
                );
            }
        }
        if lost > 0 {
            tracing::error!(lost, "the server has given up messages that were never processed");
            self.go_on = lost > arrivals.len() as u64;
        }
        ToDo { take_in: arrivals, ..ToDo::default() }
    }

    fn failed(&mut self, error: &SurveyError) {
        let after = if error.is_passing() { AGAIN } else { REMINDS };
        self.again_at = Some(Instant::now() + after);
        let cause = chain(error);
        let key = if matches!(error, SurveyError::Pending { .. }) { "pending" } else { &cause };
        if self.reminder.is_due(key) {
            tracing::error!(error = %cause, "cannot find the messages that the server has given up");
        }
    }
}
