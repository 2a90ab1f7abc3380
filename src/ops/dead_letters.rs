//! `dead-letters`: list, show, replay, discard and export them. Needs the database but no server; the daemon may run.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::handler::Handler;
use crate::model::id::Digest;
use crate::model::letter::{Closed, Closing, Envelope, Pile, Which};
use crate::model::schemes::IdSchemes;
use crate::model::text::{json, shortened};
use crate::model::time::{seconds_text, unix_ns};
use crate::ops::new_file::NewFile;
use crate::ops::signals;
use crate::ops::{Format, confirmed, operator};
use crate::store::{self, Direction, ErrorClass, OpenError, Reader, Rows, Store};
use crate::worker::inbox::replay::{self, Replay, Replayed};
use crate::worker::message_ids;

mod args;
mod text;

pub use args::DeadLettersCommand;
use args::{DiscardArgs, ExportArgs, ListArgs, ReplayArgs, Selection, ShowArgs};

/// Dead letters in one page.
const PAGE: u32 = 500;
/// The dead letters in a table without `--limit`.
const TABLE_LIMIT: u32 = 100;
/// Dead letters that one transaction discards. The daemon waits only for such a transaction.
const DISCARD_STEP: usize = 100;
/// How long a command tries to write while a busy daemon writes.
const BUSY_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum DeadLettersError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error("no dead letter has the id {0:?}")]
    NoSuchId(String),
    #[error("no dead letter has the id {id:?}; it was {} by {} at {}", closed.closing.name(), closed.by, seconds_text(closed.at_ns))]
    ClosedAlready { id: String, closed: Closed },
    #[error("nothing matches: no dead letter with a given id passes --reason, --subject, --since and --until")]
    NothingMatches,
    #[error("nothing was discarded")]
    Declined,
    #[error("this discards {0} dead letters for ever; confirm with --yes")]
    NotConfirmed(usize),
    #[error("cannot write {}", .0.display())]
    File(PathBuf, #[source] io::Error),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("stopped; {} was not written", .0.display())]
    Stopped(PathBuf),
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Runs one of the commands. `false` if a letter could not be replayed.
pub async fn run(
    config: &Config,
    command: DeadLettersCommand,
    handler: &dyn Handler,
    out: &mut impl Write,
) -> Result<bool, DeadLettersError> {
    let ended = match command {
        DeadLettersCommand::List(args) => list(config, args, out).await.map(|()| true),
        DeadLettersCommand::Show(args) => show(config, args, out).await.map(|()| true),
        DeadLettersCommand::Replay(args) => replay(config, args, handler, out).await,
        DeadLettersCommand::Discard(args) => discard(config, args, out).await.map(|()| true),
        DeadLettersCommand::Export(args) => export(config, args, out).await.map(|()| true),
    };
    ended.map_err(|error| match error {
        DeadLettersError::Store(source) if source.class == ErrorClass::Corrupt => {
            OpenError::database(&config.database, source).into()
        }
        other => other,
    })
}

async fn list(config: &Config, args: ListArgs, out: &mut impl Write) -> Result<(), DeadLettersError> {
    let mut reader = Reader::open(&config.database).await?;
    let pile = pile(args.closed);
    let limit = args.limit.unwrap_or(if args.format == Format::Json { u32::MAX } else { TABLE_LIMIT }) as usize;
    let mut letters = Letters::new(pile, args.filters.which(vec![]), Direction::NewestFirst);
    let (mut listed, mut more) = (0, 0);
    let mut widths = None;
    while let Some(mut page) = letters.next(&mut reader).await? {
        more += page.len().saturating_sub(limit - listed);
        page.truncate(limit - listed);
        listed += page.len();
        if args.format == Format::Json {
            for (_, envelope) in &page {
                writeln!(out, "{}", json(&text::fields(envelope)).map_err(io::Error::from)?)?;
            }
            if listed == limit {
                break;
            }
        } else {
            // The first page decides; a longer id in a later one only shifts its own line.
            text::table(&page, pile, &mut widths, out)?;
        }
    }
    match (args.format, listed, more) {
        (Format::Text, 0, _) => writeln!(out, "no {}", noun(pile))?,
        (Format::Text, _, 1..) => writeln!(out, "and {more} more; --limit N shows more")?,
        _ => {}
    }
    Ok(())
}

async fn show(config: &Config, args: ShowArgs, out: &mut impl Write) -> Result<(), DeadLettersError> {
    let mut reader = Reader::open(&config.database).await?;
    let mut first = true;
    for id in args.ids {
        let mut found = false;
        for pile in [Pile::Open, Pile::Closed] {
            let which = Which { ids: vec![id.clone()], ..Which::default() };
            let mut letters = Letters::new(pile, which, Direction::NewestFirst);
            while let Some(page) = letters.next(&mut reader).await? {
                for (row, _) in page {
                    let Some(letter) = reader.letter(pile, row).await? else { continue };
                    found = true;
                    if args.format == Format::Json {
                        writeln!(out, "{}", json(&text::whole(&letter)).map_err(io::Error::from)?)?;
                    } else {
                        if !first {
                            writeln!(out)?;
                        }
                        text::show(&letter, out)?;
                    }
                    first = false;
                }
            }
        }
        if !found {
            return Err(DeadLettersError::NoSuchId(id));
        }
    }
    Ok(())
}

async fn replay(
    config: &Config,
    args: ReplayArgs,
    handler: &dyn Handler,
    out: &mut impl Write,
) -> Result<bool, DeadLettersError> {
    let mut reader = Reader::open(&config.database).await?;
    let mut letters = args.selection.letters(&mut reader).await?;
    let mut store = Store::open_beside(&config.database).await?;
    let settings = message_ids::wanted(config);
    let schemes = reader.id_schemes(&settings).await?.unwrap_or_else(|| IdSchemes::unchanged(&settings));
    let wish = Replay { by: operator(), as_new: args.as_new, schemes, dry_run: args.dry_run };
    let (mut applied, mut known, mut refused, mut failed) = (0_u64, 0_u64, 0_u64, 0_u64);
    while let Some(page) = letters.next(&mut reader).await? {
        for (_, envelope) in page {
            let key = (envelope.id.as_str(), envelope.digest);
            let replayed = patiently(async || replay::replay(&mut store, handler, key, &wish).await).await?;
            let (verdict, note) = match replayed {
                Replayed::Applied(id) if id == envelope.id => (count(&mut applied, "applied"), None),
                Replayed::Applied(id) => (count(&mut applied, "applied"), Some(format!("as {id}"))),
                Replayed::Ignored => (count(&mut known, "known"), Some("the handler ignores it".to_owned())),
                Replayed::Known(_) => (count(&mut known, "known"), Some("was applied before".to_owned())),
                Replayed::Conflict => {
                    let note = "its id belongs to another order; --as-new applies it under a new id".to_owned();
                    (count(&mut refused, "refused"), Some(note))
                }
                Replayed::NoId => {
                    let note = "its publisher's id cannot be read, so the order may be applied under that id; if not, --as-new \
                                applies it under the id of its place"
                        .to_owned();
                    (count(&mut refused, "refused"), Some(note))
                }
                Replayed::Failed(error) => (count(&mut failed, "failed"), Some(error)),
                Replayed::Gone => continue,
            };
            let colon = if note.is_some() { ": " } else { "" };
            let note = shortened(&note.unwrap_or_default(), text::FIELD_MAX);
            writeln!(out, "{verdict:<8} {}{colon}{note}", shortened(&envelope.id, text::FIELD_MAX))?;
        }
    }
    let dry = if args.dry_run { "dry run, nothing was changed: " } else { "" };
    writeln!(out, "{dry}{applied} applied, {known} known, {refused} refused, {failed} failed")?;
    Ok(refused + failed == 0)
}

fn count(counter: &mut u64, verdict: &'static str) -> &'static str {
    *counter += 1;
    verdict
}

async fn discard(config: &Config, args: DiscardArgs, out: &mut impl Write) -> Result<(), DeadLettersError> {
    let mut reader = Reader::open(&config.database).await?;
    let mut letters = args.selection.letters(&mut reader).await?;
    // Only the dead letters of the question, not those that are added after it. Keys only: all payloads may not fit into memory.
    let mut keys: Vec<(String, Digest)> = Vec::new();
    while let Some(page) = letters.next(&mut reader).await? {
        keys.extend(page.into_iter().map(|(_, envelope)| (envelope.id, envelope.digest)));
    }
    if keys.is_empty() {
        writeln!(out, "no dead letters")?;
        return Ok(());
    }
    let question = format!("Discard {} dead letters for ever? Type yes to confirm: ", keys.len());
    if !args.yes {
        match confirmed(&question, "yes")? {
            Some(true) => {}
            Some(false) => return Err(DeadLettersError::Declined),
            None => return Err(DeadLettersError::NotConfirmed(keys.len())),
        }
    }
    let mut store = Store::open_beside(&config.database).await?;
    let by = operator();
    let mut discarded = 0;
    for step in keys.chunks(DISCARD_STEP) {
        discarded += patiently(async || discard_step(&mut store, step, &by).await).await?;
    }
    writeln!(out, "discarded {discarded}; `order-processor dead-letters list --closed` lists them")?;
    Ok(())
}

async fn discard_step(store: &mut Store, keys: &[(String, Digest)], by: &str) -> Result<u64, store::Error> {
    let at_ns = unix_ns(SystemTime::now());
    let closed = Closed { closing: Closing::Discarded, by: by.to_owned(), at_ns, applied_id: None };
    let mut discarded = 0;
    let mut tx = store.begin().await?;
    for (id, digest) in keys {
        if let Some(letter) = tx.take_letter(id, *digest).await? {
            tx.record_closed(&letter, &closed).await?;
            discarded += 1;
        }
    }
    tx.commit().await?;
    Ok(discarded)
}

async fn export(config: &Config, args: ExportArgs, out: &mut impl Write) -> Result<(), DeadLettersError> {
    let mut reader = Reader::open(&config.database).await?;
    let letters = Letters::new(pile(args.closed), args.filters.which(vec![]), Direction::OldestFirst);
    let Some(path) = args.file.filter(|path| path.as_os_str() != "-") else {
        write_all(letters, &mut reader, out).await?;
        return Ok(());
    };
    let failed = |source| DeadLettersError::File(path.clone(), source);
    // The incomplete file is deleted.
    let stop = CancellationToken::new();
    signals::listen(stop.clone(), || {}).map_err(DeadLettersError::Signals)?;
    let new = NewFile::create(&path).map_err(failed)?;
    let file = File::options().write(true).open(new.partial()).map_err(failed)?;
    let mut buffered = io::BufWriter::new(file);
    let written = match stop.run_until_cancelled(write_all(letters, &mut reader, &mut buffered)).await {
        None => return Err(DeadLettersError::Stopped(path)),
        Some(Err(DeadLettersError::Output(source))) => return Err(failed(source)),
        Some(written) => written?,
    };
    buffered.into_inner().map_err(|error| failed(error.into_error()))?;
    new.keep().map_err(failed)?;
    writeln!(out, "wrote {written} {} to {}", noun(pile(args.closed)), path.display())?;
    Ok(())
}

async fn write_all(mut letters: Letters, reader: &mut Reader, out: &mut impl Write) -> Result<u64, DeadLettersError> {
    let mut written = 0;
    while let Some(page) = letters.next(reader).await? {
        for (row, _) in page {
            // One dead letter at a time, because payloads may be large.
            let Some(letter) = reader.letter(letters.pile, row).await? else { continue };
            writeln!(out, "{}", json(&text::whole(&letter)).map_err(io::Error::from)?)?;
            written += 1;
        }
    }
    Ok(written)
}

/// Dead letters page by page. Each page is a separate read, so that no read keeps the WAL of the daemon large.
struct Letters {
    pile: Pile,
    which: Which,
    direction: Direction,
    left: Option<Rows>,
}

impl Letters {
    fn new(pile: Pile, which: Which, direction: Direction) -> Self {
        Self { pile, which, direction, left: Some(Rows::ALL) }
    }

    /// The next page, perhaps an empty one; `None` at the end.
    async fn next(&mut self, reader: &mut Reader) -> Result<Option<Vec<(i64, Envelope)>>, store::Error> {
        let Some(rows) = self.left.take() else { return Ok(None) };
        let (page, left) = reader.page(self.pile, &self.which, rows, self.direction, PAGE).await?;
        self.left = left;
        Ok(Some(page))
    }

    async fn have_none(mut self, reader: &mut Reader) -> Result<bool, store::Error> {
        while let Some(page) = self.next(reader).await? {
            if !page.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Selection {
    /// The dead letters of now, oldest first. Each named id must belong to a dead letter, and at least one must pass the filters.
    async fn letters(&self, reader: &mut Reader) -> Result<Letters, DeadLettersError> {
        for id in &self.ids {
            let which = Which { ids: vec![id.clone()], ..Which::default() };
            if reader.page(Pile::Open, &which, Rows::ALL, Direction::NewestFirst, 1).await?.0.is_empty() {
                let (closed, _) = reader.page(Pile::Closed, &which, Rows::ALL, Direction::NewestFirst, 1).await?;
                return Err(match closed.into_iter().find_map(|(_, envelope)| envelope.closed) {
                    Some(closed) => DeadLettersError::ClosedAlready { id: id.clone(), closed },
                    None => DeadLettersError::NoSuchId(id.clone()),
                });
            }
        }
        let through = reader.last_row().await?;
        let letters = || Letters {
            left: Some(Rows { through, ..Rows::ALL }),
            ..Letters::new(Pile::Open, self.filters.which(self.ids.clone()), Direction::OldestFirst)
        };
        if !self.ids.is_empty() && letters().have_none(reader).await? {
            return Err(DeadLettersError::NothingMatches);
        }
        Ok(letters())
    }
}

/// Tries again while another process writes, for at most [`BUSY_PATIENCE`].
async fn patiently<T>(mut work: impl AsyncFnMut() -> Result<T, store::Error>) -> Result<T, store::Error> {
    let deadline = Instant::now() + BUSY_PATIENCE;
    loop {
        match work().await {
            Err(error) if error.class == ErrorClass::Busy && Instant::now() < deadline => {}
            ended => return ended,
        }
    }
}

fn pile(closed: bool) -> Pile {
    if closed { Pile::Closed } else { Pile::Open }
}

fn noun(pile: Pile) -> &'static str {
    match pile {
        Pile::Open => "dead letters",
        Pile::Closed => "closed letters",
    }
}
