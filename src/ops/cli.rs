//! Flags → settings → logging → command → exit code.

use std::any::TypeId;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand};

use crate::config::{Config, Loaded, LogFormat};
use crate::handler::Handler;
use crate::handler::orders::Orders;
use crate::model::text::{chain, printable};
use crate::ops::adopt::AdoptArgs;
use crate::ops::audit::AuditArgs;
use crate::ops::backup::BackupArgs;
use crate::ops::completions::CompletionsArgs;
use crate::ops::dead_letters::DeadLettersCommand;
use crate::ops::exit::{CommandError, Exit, OutputError};
use crate::ops::find::FindArgs;
use crate::ops::handler::HandlerCommand;
use crate::ops::pause::PauseArgs;
use crate::ops::publish::PublishArgs;
use crate::ops::reference::ReferenceArgs;
use crate::ops::setup::SetupArgs;
use crate::ops::status::StatusArgs;
use crate::ops::teardown::TeardownArgs;
use crate::ops::{
    Format, adopt, audit, backup, check, completions, config, dead_letters, find, handler, healthcheck, json_flag, man,
    pause, publish, reference, run, setup, status, teardown,
};
use crate::telemetry::log;
use crate::worker::worker::Until;

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
    /// Check settings, connection, consumer and database; exit 1 if a check fails, 2 if the server rejects the credentials or the
    /// handler file is wrong
    Check,
    /// Print the effective settings and their sources
    Config(ConfigArgs),
    /// Create the stream and the consumer if they are missing, or change them on request; exit 1 if what exists differs from
    /// the options, 2 if `run` would refuse the consumer
    Setup(SetupArgs),
    /// Delete the stream with all its messages, or only the consumer; shows what is lost and asks first
    Teardown(TeardownArgs),
    /// Publish orders
    Publish(PublishArgs),
    /// Show ack floor, pending, redelivered, processed and dead letters; exit 1 if a problem is listed
    Status(StatusArgs),
    /// Find one order and print what became of it, with its timeline and what to do next; exit 1 if it was not applied, 3 if that is
    /// not known
    #[command(after_help = find::AFTER_HELP)]
    Find(FindArgs),
    /// Record that the consumer belongs to this database although another program has processed its orders so far (asks first)
    Adopt(AdoptArgs),
    /// Find messages at or below the ack floor that are neither processed nor dead letters; exit 1 if there are any
    #[command(after_help = audit::AFTER_HELP)]
    Audit(AuditArgs),
    /// List, show, replay, discard or export dead letters
    #[command(subcommand, subcommand_value_name = "COMMAND")]
    DeadLetters(DeadLettersCommand),
    /// Check a handler file, try an order with it, or write an example
    #[command(subcommand, subcommand_value_name = "COMMAND")]
    Handler(HandlerCommand),
    /// Copy the database and check the copy; the daemon may run
    Backup(BackupArgs),
    /// Make the daemon finish its held deliveries and close the database, until `resume`
    Pause(PauseArgs),
    /// End a pause; the daemon continues within two seconds
    Resume,
    /// Exit 0 if the daemon on this machine is ready, 1 if not, 2 if the settings are wrong (for containers)
    Healthcheck,
}

/// Documents that the binary prints. They do not depend on the settings.
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
    /// Process the pending messages, then exit; waits while the server, the stream or the consumer is missing
    #[arg(long)]
    until_idle: bool,
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// Print JSON
    #[arg(long = "json", action = ArgAction::SetTrue, value_parser = json_flag())]
    format: Format,
}

impl Command {
    /// Whether the command runs the handler, or asks it what an order would do.
    fn needs_handler(&self) -> bool {
        match self {
            Self::Run(_) | Self::Audit(_) | Self::DeadLetters(_) | Self::Find(_) => true,
            Self::Check
            | Self::Config(_)
            | Self::Setup(_)
            | Self::Teardown(_)
            | Self::Publish(_)
            | Self::Status(_)
            | Self::Adopt(_)
            | Self::Handler(_)
            | Self::Backup(_)
            | Self::Pause(_)
            | Self::Resume
            | Self::Healthcheck => false,
        }
    }
}

/// The whole program around a handler. Your own daemon is a `main` that calls this with your [`Handler`].
pub fn main<H: Handler>(handler: H) -> ExitCode {
    // Exits by itself, with 2 for wrong flags.
    let Cli { config, command } = Cli::parse();
    let command = match command {
        Chosen::Work(command) => command,
        Chosen::Print(document) => return ended(document.print(&mut io::stdout()).map_err(OutputError::from)).into(),
    };
    let loaded = match Config::load(config.as_deref(), std::env::vars_os()) {
        Ok(loaded) => loaded,
        Err(problems) => return fail(Exit::Operator, &problems.to_string()).into(),
    };
    // The logs of a command other than `run` are for people.
    let daemon = matches!(command, Command::Run(_));
    let format = if daemon { loaded.config.log.format } else { LogFormat::Text };
    let reload = match log::init(&loaded.config.log.level, format) {
        Ok(reload) => reload,
        Err(error) => return fail(Exit::Operator, &chain(&error)).into(),
    };
    if daemon {
        // One line like any other, instead of a backtrace in the middle of a JSON log.
        std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panicked")));
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start the runtime: {error}")).into(),
    };
    let is_built_in = TypeId::of::<H>() == TypeId::of::<Orders>();
    let exit = runtime.block_on(async {
        let mut handler: Arc<dyn Handler> = Arc::new(handler);
        let mut handler_problem = None;
        if command.needs_handler() {
            match handler::chosen(&loaded.config, handler.clone(), is_built_in).await {
                Ok(chosen) => handler = chosen,
                // This error may be why somebody looks for an order.
                Err(error) if matches!(command, Command::Find(_)) => handler_problem = Some(chain(&error)),
                Err(error) => return fail(error.exit(), &chain(&error)),
            }
        }
        dispatch(command, config, loaded, (handler, handler_problem), reload).await
    });
    // A batch that outlasted the drain's deadline is not waited for: nothing of it is durable or acknowledged.
    runtime.shutdown_background();
    exit.into()
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
    (handler, handler_problem): (Arc<dyn Handler>, Option<String>),
    reload: log::Reload,
) -> Exit {
    let mut out = io::stdout();
    let settings = loaded.config.clone();
    match command {
        Command::Run(args) => {
            let until = if args.until_idle { Until::Idle } else { Until::Stopped };
            let ended = run::run(settings, file, handler, reload, until).await;
            ended.map_or_else(
                |error| {
                    // The reason is a line of the log like any other.
                    tracing::error!("{}", chain(&error));
                    error.exit()
                },
                Exit::from,
            )
        }
        Command::Check => ended(check::run(&settings, &mut out).await.map_err(OutputError::from)),
        Command::Config(args) => ended(config::run(&loaded, args.format, &mut out).map_err(OutputError::from)),
        Command::Setup(args) => ended(setup::setup(&settings, args, &mut out).await),
        Command::Teardown(args) => ended(teardown::teardown(&settings, args, &mut out).await),
        Command::Publish(args) => match publish::run(&settings, args).await {
            Ok(published) => ended(writeln!(out, "{published}").map_err(OutputError::from)),
            Err(error) => ended::<()>(Err(error)),
        },
        Command::Status(args) => {
            if args.takes_the_screen()
                && let Err(error) = reload.set_level("off")
            {
                return fail(Exit::Failed, &chain(&error));
            }
            ended(status::run(&settings, args, &mut out).await.map_err(OutputError::from))
        }
        Command::Find(args) => {
            let handler = handler_problem.map_or(Ok(handler.as_ref()), Err);
            ended(find::run(&settings, args, handler, &mut out).await)
        }
        Command::Adopt(args) => ended(adopt::run(&settings, args, &mut out).await),
        Command::Audit(args) => ended(audit::run(settings, handler, args, &mut out).await),
        Command::DeadLetters(command) => ended(dead_letters::run(&settings, command, handler.as_ref(), &mut out).await),
        Command::Handler(command) => ended(handler::run(&settings, command, &mut out).await),
        Command::Backup(args) => ended(backup::run(&settings, args, &mut out).await),
        Command::Pause(args) => ended(pause::pause(&settings, args, &mut out).await),
        Command::Resume => ended(pause::resume(&settings, &mut out)),
        Command::Healthcheck => match healthcheck::run(settings.http.listen).await {
            Ok(()) => ended(writeln!(out, "ready").map_err(OutputError::from)),
            Err(error) => ended::<()>(Err(error)),
        },
    }
}

/// The exit of a command, with the error on stderr. No text if a reader has seen enough.
fn ended<T: Into<Exit>>(result: Result<T, impl CommandError>) -> Exit {
    match result {
        Ok(done) => done.into(),
        Err(error) => match error.exit() {
            Exit::Done => Exit::Done,
            exit @ (Exit::Failed | Exit::Operator | Exit::NotKnown) => fail(exit, &chain(&error)),
        },
    }
}

/// One line on stderr for each problem, whatever state stderr is in.
fn fail(exit: Exit, text: &str) -> Exit {
    let lines: Vec<_> = text.lines().map(printable).collect();
    // A failed write changes nothing: the exit code says the same.
    drop(writeln!(io::stderr(), "order-processor: {}", lines.join("\n")));
    exit
}
