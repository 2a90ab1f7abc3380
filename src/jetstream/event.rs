//! The events that the consumer passes to the worker, and what the worker passes to the consumer.

use super::error::Error;
use super::limits::Limits;
use crate::model::delivery::Arrival;
use crate::model::view::ConsumerView;

/// What happened on the side of the server.
pub enum Event {
    /// The daemon is bound. `former`: the stream is another one than before, and these deliveries arrived before that was known.
    Bound { limits: Limits, stream_created_ns: i64, former: Option<Vec<Arrival>>, view: ConsumerView },
    /// In the order of their arrival.
    Deliveries(Vec<Arrival>),
    /// Messages that the server will not deliver again and that nobody has acknowledged, as their last deliveries.
    GivenUp(Vec<Arrival>),
    /// A fresh look at stream and consumer. `edited`: the new limits, if the consumer was edited.
    Seen { view: ConsumerView, edited: Option<Limits> },
    /// The daemon was never bound, and the operator must change something before it can be.
    Refused(Error),
}

/// How much more the worker can take.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub messages: usize,
    pub bytes: usize,
}

/// Which acknowledgements the server confirms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Receipt {
    #[default]
    None,
    /// The last one. The server reads them in order, so this confirms all of them.
    Last,
}
