//! The flags of the commands on dead letters.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::SystemTime;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, ArgGroup, Args, Subcommand};

use crate::model::label::Label;
use crate::model::letter::Which;
use crate::model::outcome::Reason;
use crate::model::subject::SubjectPattern;
use crate::model::time::unix_ns;
use crate::ops::{Format, json_flag};

#[derive(Debug, Subcommand)]
pub enum DeadLettersCommand {
    /// List dead letters, newest first
    List(ListArgs),
    /// Show dead letters with headers, reason, error and payload; what is too long is cut off
    Show(ShowArgs),
    /// Apply dead letters again, each in one transaction that also removes the dead letter
    Replay(ReplayArgs),
    /// Discard dead letters for ever (asks first); they stay on record
    Discard(DiscardArgs),
    /// Write complete dead letters as lines of JSON
    Export(ExportArgs),
}

/// Filters that every command has.
#[derive(Debug, Args)]
pub struct FilterArgs {
    /// Only dead letters with this reason
    #[arg(long, value_parser = reasons())]
    pub reason: Option<Reason>,
    /// Only dead letters of this subject; * is one token, > at the end is the rest
    #[arg(long, value_name = "SUBJECT", value_parser = SubjectPattern::from_str)]
    pub subject: Option<SubjectPattern>,
    /// Only since TIME (UTC): 2026-11-29, 2026-11-29T21:00:00Z, or how long ago, such as 2h
    #[arg(long, value_name = "TIME", allow_hyphen_values = true, value_parser = time)]
    pub since: Option<SystemTime>,
    /// Only before TIME
    #[arg(long, value_name = "TIME", allow_hyphen_values = true, value_parser = time)]
    pub until: Option<SystemTime>,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub filters: FilterArgs,
    /// Show at most this many [default: 100 in a table, all with --json]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// List replayed and discarded dead letters instead
    #[arg(long)]
    pub closed: bool,
    /// Print one JSON object a line
    #[arg(long = "json", action = ArgAction::SetTrue, value_parser = json_flag())]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Message ids; all dead letters of an id are shown, closed ones too
    #[arg(required = true, value_name = "ID")]
    pub ids: Vec<String>,
    /// Print one complete JSON object a line, payload in base64
    #[arg(long = "json", action = ArgAction::SetTrue, value_parser = json_flag())]
    pub format: Format,
}

/// Letters to act on. Nothing is acted on by default.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("which").required(true).multiple(true).args(["ids", "reason", "subject", "since", "until", "all"])))]
pub struct Selection {
    /// Message ids; an id selects all dead letters that have it
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    #[command(flatten)]
    pub filters: FilterArgs,
    /// All dead letters
    #[arg(long, conflicts_with = "ids")]
    pub all: bool,
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub selection: Selection,
    /// Apply a dead letter whose id belongs to another order under a new id, and one whose id cannot be read under the id of its
    /// place in the stream
    #[arg(long)]
    pub as_new: bool,
    /// Run the handler, undo everything and print the result that a replay would have
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct DiscardArgs {
    #[command(flatten)]
    pub selection: Selection,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Write to this file, which must not exist; - is standard output [default: -]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub filters: FilterArgs,
    /// Write replayed and discarded dead letters instead
    #[arg(long)]
    pub closed: bool,
}

impl FilterArgs {
    pub fn which(&self, ids: Vec<String>) -> Which {
        Which {
            ids,
            reason: self.reason,
            subject: self.subject.clone(),
            since_ns: self.since.map(unix_ns),
            until_ns: self.until.map(unix_ns),
        }
    }
}

fn reasons() -> impl TypedValueParser<Value = Reason> {
    PossibleValuesParser::new(Reason::ALL.iter().map(|reason| reason.name())).map(|name| {
        let reason = Reason::ALL.iter().find(|reason| reason.name() == name);
        *reason.expect("only names of reasons are possible values")
    })
}

/// `2h`, which is two hours ago, a moment as RFC 3339 has it, or a date, which is its midnight in UTC.
fn time(text: &str) -> Result<SystemTime, String> {
    let ago = humantime::parse_duration(text).ok().and_then(|ago| SystemTime::now().checked_sub(ago));
    ago.or_else(|| humantime::parse_rfc3339_weak(text).ok())
        .or_else(|| humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).ok())
        .ok_or_else(|| "give 90m or 2d for so long ago, a date such as 2026-11-29, or 2026-11-29T21:00:00Z".to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_durations_ago_or_moments() {
        let ago = SystemTime::now().duration_since(time("2h").unwrap()).unwrap();
        assert!(ago > Duration::from_secs(7100) && ago < Duration::from_secs(7300), "{ago:?}");
        let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        assert_eq!(time("2023-11-14T22:13:20Z").unwrap(), moment);
        assert_eq!(time("2023-11-14 22:13:20").unwrap(), moment);
        let midnight = SystemTime::UNIX_EPOCH + Duration::from_secs(1_699_920_000);
        assert_eq!(time("2023-11-14").unwrap(), midnight);
        for bad in ["", "soon", "2", "2023", "2h ago", "2023-11", "2023-13-01", "-2h"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }
}
