//! When to look for the messages that the server has given up, and what follows from what a [survey](crate::worker::survey) found.

use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Duration, Instant};

use crate::jetstream::consumer::Receipt;
use crate::model::delivery::{Arrival, Reply};
use crate::model::text::chain;
use crate::model::view::ConsumerView;
use crate::telemetry::Reminder;
use crate::worker::survey::{Conclusion, Judged, LookedAt, Survey, SurveyError, Surveyed};

/// Until a search that could not conclude is tried again with the same figures.
const AGAIN: Duration = Duration::from_secs(10);
/// And until one is repeated that somebody has to look into: with a repaired database it has another result.
const REMINDS: Duration = Duration::from_secs(600);
/// A server that crashes comes back as it was at the most this long before (nats-server 2.15 writes where a consumer stands ten
/// times in a second).
const CRASH_FORGETS_MAX: Duration = Duration::from_secs(10);

/// The search for messages that the server has given up.
#[derive(Default)]
pub struct GivenUp {
    survey: Option<Running>,
    /// There was one since the start.
    begun: bool,
    /// How many the server had given up by its own figures when we last looked for them.
    looked_into: u64,
    /// And deliveries were pending then, so it could not tell all.
    while_pending: bool,
    /// How many they were when we acknowledged all that was processed, in case it was among them.
    acknowledged: Option<u64>,
    /// The next look brings another survey: for the rest, or to see what the acknowledgements made of the figures.
    go_on: bool,
    /// The last one could not conclude.
    again_at: Option<Instant>,
    /// There are messages about which nothing can be told, within what was judged.
    set_aside: bool,
    judged: Boundary,
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
    /// Whether the next look needs them to have arrived.
    pub receipt: Receipt,
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

    /// A new binding. What could not be found over the last connection may be found over this one.
    pub fn bound(&mut self, view: &ConsumerView) {
        self.looked_into = 0;
        self.judged.fall_back(view);
    }

    /// The stream is another one: what is under way is about its predecessor.
    pub fn forget(&mut self) {
        if let Some(survey) = self.survey.take() {
            survey.abort();
        }
        *self = Self::default();
    }

    /// Begins a survey if this look at the consumer calls for one, and there is the way to do it.
    pub fn seen(
        &mut self,
        view: &ConsumerView,
        max_deliver: Option<u64>,
        survey: impl FnOnce(Judged) -> Option<Survey>,
    ) {
        let evidence = Survey::evidence(view);
        self.looked_into = self.looked_into.min(evidence);
        if evidence == 0 {
            (self.go_on, self.again_at, self.acknowledged) = (false, None, None);
        }
        let settled = self.while_pending && view.num_ack_pending == 0 && evidence > 0;
        if view.num_redelivered == 0 && view.num_ack_pending == 0 {
            // Whatever is unknown up to here was not given up, or the server has forgotten it: no figure will ever tell.
            self.judged.set(Judged { through: view.delivered_stream_seq, given_up: 0 });
        }
        // At the start, before anything of ours is pending, the figures tell less than they could.
        let at_start = !self.begun && max_deliver.is_some() && view.num_redelivered > 0;
        let again_is_due = self.again_at.is_some_and(|at| at <= Instant::now());
        if again_is_due && self.set_aside {
            self.judged = Boundary::default();
        }
        if (at_start || self.go_on || again_is_due || settled || evidence > self.looked_into)
            && self.survey.is_none()
            && let Some(survey) = survey(self.judged.now)
        {
            self.begun = true;
            self.looked_into = evidence;
            self.while_pending = view.num_ack_pending > 0;
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
                self.again_at = Some(Instant::now() + AGAIN);
                let cause = chain(&error);
                if self.reminder.is_due(&cause) {
                    tracing::error!(error = %cause, "cannot find the messages that the server has given up");
                }
                return ToDo::default();
            }
            Err(error) => {
                self.again_at = Some(Instant::now() + AGAIN);
                tracing::error!(%error, "the search for messages that the server has given up has failed");
                return ToDo::default();
            }
        };
        let is_news = self.acknowledged != Some(evidence);
        let acknowledge = if is_news { processed } else { Vec::new() };
        if let Conclusion::GoOn(survey) = conclusion {
            self.survey = Some(tokio::spawn(survey.run()));
            return ToDo { acknowledge, ..ToDo::default() };
        }
        if !acknowledge.is_empty() {
            // Some of it may be what was given up. Once the server knows what was processed its figure is that of the lost ones.
            self.acknowledged = Some(evidence);
            self.go_on = true;
            return ToDo { acknowledge, receipt: Receipt::Last, ..ToDo::default() };
        }
        let take_in = match conclusion {
            Conclusion::Done { arrivals, lost, looked_at } => {
                self.found(arrivals.len() as u64, lost, looked_at, pending);
                arrivals
            }
            Conclusion::CannotTell { unknown, looked_at } => {
                self.cannot_tell(unknown, looked_at, pending);
                Vec::new()
            }
            Conclusion::GoOn(_) => Vec::new(),
        };
        ToDo { take_in, ..ToDo::default() }
    }

    fn found(&mut self, kept: u64, lost: u64, looked_at: LookedAt, pending: bool) {
        let LookedAt { from, given_up, judged } = looked_at;
        if lost > 0 {
            tracing::error!(lost, "the server has given up messages that were never processed");
            self.go_on = lost > kept;
        }
        if pending {
            self.again_at = Some(Instant::now() + AGAIN);
            return;
        }
        if lost == 0 {
            self.judged.set(judged);
        }
        if lost < given_up {
            self.again_at = Some(Instant::now() + REMINDS);
            self.set_aside = true;
            let cause = format!("messages {from} to {}", judged.through);
            if self.reminder.is_due(&cause) {
                tracing::error!(
                    given_up,
                    found = lost,
                    "the server has given up more messages than can be found among {cause}: their ids may be pruned, or they \
                     are from before the consumer's start; see `order-processor audit`"
                );
            }
        }
    }

    fn cannot_tell(&mut self, unknown: u64, looked_at: LookedAt, pending: bool) {
        let LookedAt { from, given_up, judged } = looked_at;
        let to = judged.through;
        if pending {
            self.again_at = Some(Instant::now() + AGAIN);
            if self.reminder.is_due("pending") {
                tracing::error!(
                    unknown,
                    "cannot find the messages that the server has given up: this database knows nothing of some of the \
                     messages {from} to {to}; as long as deliveries are pending it cannot be told whether the server has given \
                     them up; `order-processor audit` lists them"
                );
            }
            return;
        }
        // What comes later is judged for itself.
        self.again_at = Some(Instant::now() + REMINDS);
        self.set_aside = true;
        self.judged.set(judged);
        if self.reminder.is_due(&format!("{from} to {to}")) {
            tracing::error!(
                given_up,
                unknown,
                "cannot find the messages that the server has given up: it says {given_up} of messages {from} to {to}, and this \
                 database knows nothing of {unknown}: another database has part of them, they were not for this consumer when it \
                 passed them, or the server has forgotten what it gave up; which ones were lost cannot be told; \
                 `order-processor audit` lists all that this database does not know"
            );
        }
    }
}

/// What is judged, now and as far as a crash of the server cannot undo it.
#[derive(Default)]
struct Boundary {
    now: Judged,
    lasting: Judged,
    /// What will last once it is old enough.
    since: Option<(Judged, Instant)>,
}

impl Boundary {
    fn set(&mut self, judged: Judged) {
        self.now = judged;
        self.grow_old();
        self.since.get_or_insert((judged, Instant::now()));
    }

    fn grow_old(&mut self) {
        if let Some((judged, _)) = self.since.take_if(|(_, at)| at.elapsed() >= CRASH_FORGETS_MAX) {
            self.lasting = judged;
        }
    }

    fn fall_back(&mut self, view: &ConsumerView) {
        self.grow_old();
        if self.lasting.through > view.delivered_stream_seq {
            // The server was restored from a copy.
            self.lasting = Judged::default();
        }
        self.now = self.lasting;
        self.since = None;
    }
}
