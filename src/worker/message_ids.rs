//! How ids are made: what the settings want, and what a change of it means for an operator.

use crate::config::{Config, IdScope, OnMissingId};
use crate::model::id::{IdScheme, UniqueIn};
use crate::model::schemes::{IdSchemes, IdSettings, SchemeChange};

/// What the settings want.
pub fn wanted(config: &Config) -> IdSettings {
    let unique_in = match &config.inbox.id_scope {
        IdScope::Subject => UniqueIn::Subject,
        IdScope::Stream => UniqueIn::Stream,
        IdScope::Header(name) => UniqueIn::Header(name.clone()),
    };
    IdSettings {
        scheme: IdScheme {
            stream: config.consumer.stream.clone(),
            pointer: config.inbox.id_pointer.clone(),
            unique_in,
        },
        missing_is_dead: config.inbox.on_missing_id == OnMissingId::DeadLetter,
    }
}

/// Logs the change that a bind has recorded.
pub fn log_change(schemes: &IdSchemes) {
    let Some((SchemeChange { scheme, former }, before)) = schemes.changes.split_last() else { return };
    let before = before.last().map_or(&schemes.first, |change| &change.scheme);
    tracing::warn!(
        former = %before,
        now = %scheme,
        from_seq = former.next_seq(),
        "the settings that make message ids have changed: messages that were delivered before keep their ids"
    );
}

/// What an operator must know if the settings are not those of the newest bind.
pub fn difference(schemes: &IdSchemes, settings: &IdSettings) -> Option<String> {
    let (newest, wanted) = (schemes.newest(), schemes.wanted(settings));
    (*newest != wanted).then(|| {
        format!(
            "the settings make message ids in another way ({wanted}) than the database records ({newest}); the record holds until \
             the next start of the daemon, and then for the messages that were delivered before"
        )
    })
}

/// Which settings make the ids of which messages, for an operator.
pub fn history(schemes: &IdSchemes) -> String {
    let mut parts = vec![schemes.first.to_string()];
    for SchemeChange { scheme, former } in &schemes.changes {
        parts.push(format!("from message {}: {scheme}", former.next_seq()));
    }
    parts.join("; ")
}
