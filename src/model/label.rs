//! The values of one label of a metric.

/// The values of one label. Few and fixed by design: an id or a subject as a label would be a new series per order.
pub trait Label: Copy + 'static {
    /// The label's name.
    const KEY: &'static str;
    /// Every value, in the order of [`Label::index`].
    const ALL: &'static [Self];
    /// The label's value in the exposition.
    fn name(self) -> &'static str;
    /// The place of this value in [`Label::ALL`].
    fn index(self) -> usize;
}
