//! The values of one label of a metric.

/// The values of one label. Few and fixed by design: an id or a subject as a label would be a new series per order.
/// Declare one with the macro `label!`.
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

/// Declares an enum as the values of a label: `enum Name: "key" { Variant = "value" }`. One list, so that no value can be
/// missing from [`Label::ALL`].
macro_rules! label {
    (
        $(#[$meta:meta])*
        pub enum $name:ident: $key:literal {
            $($(#[$variant_meta:meta])* $variant:ident = $value:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$variant_meta])* $variant,)+
        }

        impl $crate::model::label::Label for $name {
            const KEY: &'static str = $key;
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $value,)+
                }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

pub(crate) use label;
