//! A reader who types the `console` blocks of a page, from its first line to its last, and compares what the page shows.
//!
//! Each page has its own server, folder and HTTP port. `order-processor run` stays in the foreground of another terminal until
//! the page shows `^C`; its lines must appear in its log. All other commands run to their end, and all lines must agree. A line
//! `...` stands for any number of lines, and `...` at the end of a line for the rest of the line. Values that differ from run to
//! run (times, digests, process ids, user and host) may differ. `<!--console` hides a block from readers of the page.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{PATIENCE, signal};

/// How long a command that only reads is repeated until it prints what the page shows.
const READ_PATIENCE: Duration = Duration::from_secs(20);
const READ_AGAIN: Duration = Duration::from_millis(200);
/// What a page calls the addresses and the folder of its session.
const NATS_ADDRESS: &str = "127.0.0.1:4222";
const HTTP_ADDRESS: &str = "127.0.0.1:9464";
const FOLDER: &str = "/srv/orders";

/// A command, and what the page shows of its output.
pub struct Step {
    /// Where the output begins in the page, as an index into its lines.
    pub at: usize,
    pub command: String,
    pub shown: Vec<String>,
    hidden: bool,
}

/// The commands of a page in their order.
pub fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let (mut inside, mut hidden) = (false, false);
    for (index, line) in text.lines().enumerate() {
        if !inside {
            hidden = line == "<!--console";
            inside = hidden || line == "```console";
            continue;
        }
        if line == "```" || line == "-->" {
            inside = false;
            continue;
        }
        if let (Some(more), Some(step)) = (line.strip_prefix("> "), steps.last_mut()) {
            step.command += "\n";
            step.command += more;
            step.at = index + 1;
        } else if line == "^C" || line.starts_with("$ ") {
            let command = line.strip_prefix("$ ").unwrap_or(line).to_owned();
            steps.push(Step { at: index + 1, command, shown: Vec::new(), hidden });
        } else if let Some(step) = steps.last_mut() {
            step.shown.push(line.to_owned());
        } else {
            panic!("line {}: output without a command: {line}", index + 1);
        }
    }
    steps
}

/// One reader of one page.
pub struct ConsoleSession {
    folder: TempDir,
    nats: String,
    http: String,
    daemon: Option<Running>,
    /// Log lines of the daemon that were compared already.
    read: usize,
    exit_code: i32,
}

struct Running {
    child: Child,
    log: PathBuf,
}

impl ConsoleSession {
    /// `nats`: host and port of the server.
    pub fn new(nats: String) -> Self {
        let folder = TempDir::new().expect("a temporary folder can be made");
        // On a terminal, curl shows no progress either.
        std::fs::write(folder.path().join(".curlrc"), "silent\n").expect("the folder can be written");
        Self { folder, nats, http: format!("127.0.0.1:{}", quiet_port()), daemon: None, read: 0, exit_code: 0 }
    }

    /// Runs a command as the page shows it.
    ///
    /// # Errors
    /// What it printed instead.
    pub fn play(&mut self, step: &Step) -> Result<(), Vec<String>> {
        if step.command == "^C" {
            return self.interrupt(&step.shown);
        }
        if is_daemon(&step.command) {
            return self.start(&step.command, &step.shown);
        }
        let deadline = Instant::now() + READ_PATIENCE;
        loop {
            let printed = self.run(&step.command);
            if step.hidden {
                return if self.exit_code == 0 { Ok(()) } else { Err(printed) };
            }
            if agree(&step.shown, &printed) {
                return Ok(());
            }
            if !only_reads(&step.command) || Instant::now() > deadline {
                return Err(printed);
            }
            std::thread::sleep(READ_AGAIN);
        }
    }

    /// What the daemon logged, if one was started.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("run.log")).unwrap_or_default()
    }

    /// Whether the last command failed.
    pub fn failed(&self) -> bool {
        self.exit_code != 0
    }

    fn run(&mut self, command: &str) -> Vec<String> {
        let typed = format!("exec 2>&1; (exit {}); {}", self.exit_code, self.at_home(command));
        let output = self.shell(&typed).output().expect("bash can be started");
        self.exit_code = code(output.status);
        self.as_shown(&String::from_utf8_lossy(&output.stdout))
    }

    fn start(&mut self, command: &str, shown: &[String]) -> Result<(), Vec<String>> {
        let log = self.folder.path().join("run.log");
        let file = File::create(&log).expect("the log can be created");
        let typed = self.at_home(command);
        let child = self.shell(&typed).stdout(Stdio::null()).stderr(file).spawn().expect("bash can be started");
        self.read = 0;
        self.daemon = Some(Running { child, log });
        let answers = |session: &Self| std::net::TcpStream::connect(&session.http).is_ok();
        let deadline = Instant::now() + PATIENCE;
        while !self.has_ended() && !answers(self) && Instant::now() < deadline {
            std::thread::sleep(READ_AGAIN);
        }
        self.logs(shown)
    }

    fn interrupt(&mut self, shown: &[String]) -> Result<(), Vec<String>> {
        let daemon = self.daemon.as_mut().expect("^C stands after `order-processor run`");
        signal(daemon.child.id(), "INT");
        self.exit_code = code(daemon.child.wait().expect("the daemon can be waited for"));
        self.logs(shown)
    }

    /// Waits until the log has these lines, in this order.
    fn logs(&mut self, shown: &[String]) -> Result<(), Vec<String>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let ended = self.has_ended();
            let Some(daemon) = &self.daemon else { return Ok(()) };
            let log = std::fs::read_to_string(&daemon.log).expect("the log can be read");
            let lines = self.as_shown(&log);
            let mut rest = self.read;
            let all = shown.iter().filter(|line| *line != "...").all(|wanted| {
                let found = lines[rest..].iter().position(|line| agrees(wanted, line));
                rest = found.map_or(rest, |found| rest + found + 1);
                found.is_some()
            });
            if all {
                self.read = rest;
                return Ok(());
            }
            if ended || Instant::now() > deadline {
                return Err(lines);
            }
            std::thread::sleep(READ_AGAIN);
        }
    }

    fn has_ended(&mut self) -> bool {
        let Some(daemon) = &mut self.daemon else { return true };
        let ended = daemon.child.try_wait().expect("the daemon can be waited for");
        self.exit_code = ended.map_or(self.exit_code, code);
        ended.is_some()
    }

    /// The command with the addresses of this session.
    fn at_home(&self, command: &str) -> String {
        command.replace(NATS_ADDRESS, &self.nats).replace(HTTP_ADDRESS, &self.http).replace(FOLDER, &self.path())
    }

    /// The lines with the addresses of the page.
    fn as_shown(&self, printed: &str) -> Vec<String> {
        let text = printed.replace(&self.nats, NATS_ADDRESS).replace(&self.http, HTTP_ADDRESS);
        let text = text.replace(&self.path(), FOLDER);
        text.lines().map(str::trim_end).filter(|line| !line.is_empty()).map(ToOwned::to_owned).collect()
    }

    fn path(&self) -> String {
        self.folder.path().display().to_string()
    }

    fn shell(&self, typed: &str) -> Command {
        let mut shell = Command::new("bash");
        shell.args(["--norc", "--noprofile", "-c", typed]).stdin(Stdio::null());
        let binary = Path::new(env!("CARGO_BIN_EXE_order-processor"));
        let folder = binary.parent().expect("the binary is in a folder").display();
        shell
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", format!("{folder}:{}", std::env::var("PATH").expect("there is a PATH")))
            .env("HOME", self.folder.path())
            .env("ORDER_PROCESSOR__NATS__URL", format!("nats://{}", self.nats))
            .env("ORDER_PROCESSOR__HTTP__LISTEN", &self.http)
            // As on a terminal.
            .env("ORDER_PROCESSOR__LOG__FORMAT", "text");
        shell
    }
}

impl Drop for ConsoleSession {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            // Both fail only if it has ended already.
            drop(daemon.child.kill());
            drop(daemon.child.wait());
        }
    }
}

/// A port that stays free between two commands: below those that the kernel gives to outgoing connections.
fn quiet_port() -> u16 {
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut candidates = std::iter::repeat_with(|| fastrand::u16(20_000..32_000)).take(1000);
    candidates.find(is_free).expect("one of a thousand ports is free")
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or(-1)
}

fn is_daemon(command: &str) -> bool {
    command.contains("order-processor run") && !command.contains("--until-idle") && !command.contains("&&")
}

/// Whether a command may be repeated.
fn only_reads(command: &str) -> bool {
    let reads =
        ["order-processor status", "order-processor check", "order-processor dead-letters list", "curl ", "sqlite3 "];
    reads.iter().any(|reads| command.starts_with(reads)) && !command.contains("TRIGGER")
}

/// Whether the page shows what was printed.
fn agree(shown: &[String], printed: &[String]) -> bool {
    let shown: Vec<&String> = shown.iter().filter(|line| !line.trim().is_empty()).collect();
    fn rest(shown: &[&String], printed: &[String]) -> bool {
        match (shown.split_first(), printed.split_first()) {
            (None, None) => true,
            (Some((dots, later)), _) if *dots == "..." => {
                rest(later, printed) || printed.split_first().is_some_and(|(_, printed)| rest(shown, printed))
            }
            (Some((line, later)), Some((found, printed))) => agrees(line, found) && rest(later, printed),
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
    rest(&shown, printed)
}

fn agrees(shown: &str, printed: &str) -> bool {
    let printed = masked(printed);
    match shown.trim_end().strip_suffix("...") {
        Some(start) => printed.starts_with(masked(start).trim_end()),
        None => masked(shown) == printed,
    }
}

/// The line with a name in the place of each value that differs from run to run, and one space between words.
fn masked(line: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || "@._:+-".contains(c);
    let mut words: Vec<String> = Vec::new();
    let mut rest = line.trim();
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c: char| is_word(c) != is_word(first)).unwrap_or(rest.len());
        let (word, later) = rest.split_at(end);
        let before = words.iter().rev().find(|word| !word.trim().is_empty()).cloned().unwrap_or_default();
        words.push(if is_word(first) { mask(word, &before, later) } else { word.to_owned() });
        rest = later;
    }
    let text = words.concat().split_whitespace().collect::<Vec<_>>().join(" ");
    // A log line begins with its time, which pages leave out.
    text.strip_prefix("<time> ").map_or(text.clone(), ToOwned::to_owned)
}

fn mask(word: &str, before: &str, later: &str) -> String {
    let bare = word.trim_end_matches(['.', ':', '-']);
    let tail = &word[bare.len()..];
    let digits = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
    let is_version = bare.split('.').count() == 3 && bare.split('.').all(digits);
    let is_clock = bare.len() == 8 && bare.split(':').count() == 3 && bare.split(':').all(digits);
    let is_time = bare.len() >= 20 && bare.as_bytes().get(10) == Some(&b'T') && bare.ends_with('Z');
    let is_number = bare.parse::<f64>().is_ok() && !bare.is_empty();
    let unit = bare.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let is_duration = unit.len() < bare.len() && ["ns", "µs", "ms", "s", "m"].contains(&unit);
    let is_counted = is_number && ["ms", "s", "µs"].contains(&later.split_whitespace().next().unwrap_or_default());
    let name = match () {
        () if bare.starts_with("order_processor::") => "<module>",
        () if bare.contains('@') => "<who or id>",
        () if is_time => "<time>",
        () if is_clock => "<clock>",
        () if is_version => "<version>",
        () if bare.len() >= 16 && bare.chars().all(|c| c.is_ascii_hexdigit()) => "<hex>",
        () if is_duration || is_counted => "<took>",
        () if is_number && before == "process" => "<process>",
        () => bare,
    };
    format!("{name}{tail}")
}
