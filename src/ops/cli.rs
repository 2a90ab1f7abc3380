//! Flags → settings → logging → command → exit code.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::{Config, Loaded, LogFormat};
use crate::handler::Handler;
use crate::model::text::chain;
use crate::ops::audit::{AuditArgs, AuditError};
use crate::ops::backup::{BackupArgs, BackupError};
use crate::ops::check::Verdict;
use crate::ops::completions::CompletionsArgs;
use crate::ops::dead_letters::{DeadLettersCommand, DeadLettersError};
use crate::ops::pause::PauseArgs;
use crate::ops::publish::PublishArgs;
use crate::ops::reference::ReferenceArgs;
use crate::ops::run::RunError;
use crate::ops::setup::{Outcome, SetupArgs};
use crate::ops::status::StatusArgs;
use crate::ops::teardown::TeardownArgs;
use crate::ops::{
    audit, backup, check, completions, config, dead_letters, healthcheck, man, pause, publish, reference, run, setup,
    status, teardown,
};
use crate::store::OpenError;
use crate::telemetry::log;
use crate::worker::shift::ShiftError;
use crate::worker::worker::{Until, WorkerError};

/// It ran and failed, or the deadline of the drain passed.
const FAILED: u8 = 1;
/// The operator must change flags, settings, the consumer or the database file; a restart would not help.
const OPERATOR: u8 = 2;

/// Applies each order of a JetStream stream once: acknowledged only after its effect is durable.
#[derive(Debug, Parser)]
#[command(name = "order-processor", version, subcommand_value_name = "COMMAND")]
struct Cli {
    /// Settings file (TOML) [default: /etc/order-processor/config.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Chosen,
}

#[derive(Debug, Subcommand)]
enum Chosen {
    #[command(flatten)]
    Work(Command),
    #[command(flatten)]
    Print(Document),
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Process orders until SIGTERM
    Run(RunArgs),
    /// Look at settings, connection, consumer and database; exit 1 if one of them fails, 2 if the server does not let us in
    Check,
    /// Print the effective settings and where each came from
    Config(ConfigArgs),
    /// Create the stream and the consumer if they are missing, or change them on request; exit 1 if what exists differs from
    /// the options, 2 if `run` would refuse the consumer
    Setup(SetupArgs),
    /// Delete the stream with all its messages, or only the consumer; shows what is lost and asks first
    Teardown(TeardownArgs),
    /// Publish orders
    Publish(PublishArgs),
    /// Show ack floor, pending, redelivered, processed and dead letters; exit 1 if it shows a problem
    Status(StatusArgs),
    /// Look for messages at or below the ack floor that are neither processed nor dead letters; exit 1 if there is one
    #[command(after_help = audit::AFTER_HELP)]
    Audit(AuditArgs),
    /// Look at dead letters, apply them again, or give them up
    #[command(subcommand, subcommand_value_name = "COMMAND")]
    DeadLetters(DeadLettersCommand),
    /// Copy the database, checked, while the daemon runs or not
    Backup(BackupArgs),
    /// Make the daemon finish what it holds and let go of the database, until `resume`
    Pause(PauseArgs),
    /// End a pause; the daemon goes on within two seconds
    Resume,
    /// Exit 0 if the daemon on this machine is ready, 1 if not, 2 if the settings are wrong (for containers)
    Healthcheck,
}

/// What the binary says about itself, whatever the settings are.
#[derive(Debug, Subcommand)]
enum Document {
    /// Print a script that completes commands and options in a shell
    #[command(after_help = "In bash, for this session: source <(order-processor completions bash)")]
    Completions(CompletionsArgs),
    /// Print the manual page; to read it: order-processor man | man -l -
    Man,
    /// Print a page of docs/reference
    #[command(hide = true)]
    Reference(ReferenceArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Process what is pending, then exit
    #[arg(long)]
    until_idle: bool,
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The whole program around a handler. A daemon of your own is a `main` that calls this with your [`Handler`].
pub fn main(handler: impl Handler) -> ExitCode {
    // Exits by itself, with 2 for wrong flags.
    let Cli { config, command } = Cli::parse();
    let command = match command {
        Chosen::Work(command) => command,
        Chosen::Print(document) => return answer(document.print(&mut io::stdout()).map(|()| true)),
    };
    let loaded = match Config::load(config.as_deref(), std::env::vars_os()) {
        Ok(loaded) => loaded,
        Err(problems) => return fail(OPERATOR, &problems.to_string()),
    };
    // What a command prints is its answer; logs of a command that is no daemon are for people.
    let daemon = matches!(command, Command::Run(_));
    let format = if daemon { loaded.config.log.format } else { LogFormat::Text };
    let reload = match log::init(&loaded.config.log.level, format) {
        Ok(reload) => reload,
        Err(error) => return fail(OPERATOR, &chain(&error)),
    };
    if daemon {
        // One line like any other, instead of a backtrace in the middle of a JSON log.
        std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panicked")));
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &format!("cannot start the runtime: {error}")),
    };
    let code = runtime.block_on(dispatch(command, config, loaded, handler, reload));
    // A batch that outlasted the drain's deadline is not waited for: nothing of it is durable or acknowledged.
    runtime.shutdown_background();
    code
}

impl Document {
    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Completions(args) => completions::run(Cli::command(), args, out),
            Self::Man => man::run(Cli::command(), out),
            Self::Reference(args) => reference::run(Cli::command(), args, out),
        }
    }
}

async fn dispatch(
    command: Command,
    file: Option<PathBuf>,
    loaded: Loaded,
    handler: impl Handler,
    reload: log::Reload,
) -> ExitCode {
    let mut out = io::stdout();
    let settings = loaded.config.clone();
    match command {
        Command::Run(args) => {
            let until = if args.until_idle { Until::Idle } else { Until::Stopped };
            match run::run(settings, file, Arc::new(handler), reload, until).await {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    tracing::error!("{}", chain(&error));
                    ExitCode::from(run_code(&error))
                }
            }
        }
        Command::Check => match check::run(&settings, &mut out).await {
            Ok(Verdict::LockedOut) => ExitCode::from(OPERATOR),
            verdict => answer(verdict.map(|verdict| verdict == Verdict::Good)),
        },
        Command::Config(args) => answer(config::run(&loaded, args.json, &mut out).map(|()| true)),
        Command::Setup(args) => match setup::setup(&settings, args, &mut out).await {
            Ok(Outcome::Good) => ExitCode::SUCCESS,
            Ok(Outcome::Differs) => ExitCode::from(FAILED),
            Ok(Outcome::Refused) => ExitCode::from(OPERATOR),
            Err(error) => fail(FAILED, &chain(&error)),
        },
        Command::Teardown(args) => match teardown::teardown(&settings, args, &mut out).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &chain(&error)),
        },
        Command::Publish(args) => match publish::run(&settings, args).await {
            Ok(published) => {
                let text =
                    format!("published {}, of which {} were known already\n", published.stored, published.duplicates);
                answer(out.write_all(text.as_bytes()).map(|()| true))
            }
            Err(error) => fail(if error.is_about_flags() { OPERATOR } else { FAILED }, &chain(&error)),
        },
        Command::Status(args) => {
            if args.takes_the_screen()
                && let Err(error) = reload.set_level("off")
            {
                return fail(FAILED, &chain(&error));
            }
            answer(status::run(&settings, args, &mut out).await)
        }
        Command::Audit(args) => match audit::run(settings, Arc::new(handler), args, &mut out).await {
            Ok(all_there) => answer(Ok(all_there)),
            Err(AuditError::Output(error)) => answer(Err(error)),
            Err(error) => fail(audit_code(&error), &chain(&error)),
        },
        Command::DeadLetters(command) => match dead_letters::run(&settings, command, &handler, &mut out).await {
            Ok(good) => answer(Ok(good)),
            Err(DeadLettersError::Output(error)) => answer(Err(error)),
            Err(DeadLettersError::Open(error)) => fail(open_code(&error), &chain(&error)),
            Err(error) => fail(FAILED, &chain(&error)),
        },
        Command::Backup(args) => match backup::run(&settings, args, &mut out).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(BackupError::Database(error)) => fail(open_code(&error), &chain(&error)),
            Err(error) => fail(FAILED, &chain(&error)),
        },
        Command::Pause(args) => match pause::pause(&settings, args, &mut out).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &chain(&error)),
        },
        Command::Resume => match pause::resume(&settings, &mut out) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &chain(&error)),
        },
        Command::Healthcheck => match healthcheck::run(settings.http.listen).await {
            Ok(()) => answer(out.write_all(b"ready\n").map(|()| true)),
            Err(error) => fail(FAILED, &chain(&error)),
        },
    }
}

/// The exit code of a command that printed its answer; a reader that went away is no failure of ours.
fn answer(printed: io::Result<bool>) -> ExitCode {
    match printed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &format!("cannot write the answer: {error}")),
    }
}

fn run_code(error: &RunError) -> u8 {
    match error {
        RunError::Bind(_) | RunError::Files(_) | RunError::Shift(ShiftError::Paused(_)) => OPERATOR,
        RunError::Shift(ShiftError::Open(error)) => open_code(error),
        RunError::Shift(ShiftError::Worker(WorkerError::Refused(_) | WorkerError::Corrupt(_))) => OPERATOR,
        RunError::Shift(ShiftError::Worker(
            WorkerError::Deadline(_) | WorkerError::Panicked(_) | WorkerError::Close(_),
        ))
        | RunError::Signals(_) => FAILED,
    }
}

fn audit_code(error: &AuditError) -> u8 {
    match error {
        AuditError::Open(error) => open_code(error),
        AuditError::Connect(error) if error.is_about_settings() => OPERATOR,
        AuditError::Connect(_)
        | AuditError::Bind(_)
        | AuditError::Signals(_)
        | AuditError::Stopped { .. }
        | AuditError::OtherStream { .. }
        | AuditError::Database { .. }
        | AuditError::Output(_) => FAILED,
    }
}

fn open_code(error: &OpenError) -> u8 {
    if error.is_for_operator() { OPERATOR } else { FAILED }
}

/// One line on stderr, whatever state stderr is in.
fn fail(code: u8, text: &str) -> ExitCode {
    // Nobody left to tell: the exit code still does.
    drop(writeln!(io::stderr(), "order-processor: {text}"));
    ExitCode::from(code)
}
