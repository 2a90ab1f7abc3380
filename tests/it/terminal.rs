//! What operators look at and type in a terminal: the live status, questions, completions and the manual page.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::support::{Broker, DaemonSpec, PATIENCE, at_least, eventually};

/// A spec for commands that need no server.
fn offline() -> DaemonSpec {
    DaemonSpec::new("nats://127.0.0.1:1")
}

/// Runs a program of the system; `None` where it is not installed, said loudly.
fn program(command: &mut Command) -> Option<Output> {
    match command.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: {} is not installed", command.get_program().display());
            None
        }
        Err(error) => panic!("{command:?}: {error}"),
    }
}

#[tokio::test]
async fn bash_completes_commands_and_options_after_sourcing_the_script() {
    let spec = offline();
    let script = spec.run_ok(&["completions", "bash"]).await.stdout;
    let file = spec.folder().join("completions.bash");
    std::fs::write(&file, script).unwrap();
    for (typed, wanted) in [
        (&["sta"][..], "status"),
        (&["status", "--w"], "--watch"),
        (&["completions", "f"], "fish"),
        (&["--con"], "--config"),
        (&["dead-letters", "sh"], "show"),
        (&["dead-letters", "discard", "--y"], "--yes"),
    ] {
        let words = typed.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let ask = format!(
            "source '{}'; COMP_WORDS=(order-processor {words}); COMP_CWORD={}; \
             function=$(complete -p order-processor); function=${{function#*-F }}; function=${{function%% *}}; \
             $function order-processor '{}' '{}'; printf '%s\\n' \"${{COMPREPLY[@]}}\" | sort | xargs",
            file.display(),
            typed.len(),
            typed.last().unwrap(),
            if typed.len() > 1 { typed[typed.len() - 2] } else { "order-processor" },
        );
        let Some(output) = program(Command::new("bash").args(["--norc", "-c", &ask])) else { return };
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), wanted, "{typed:?}: {output:?}");
    }
}

#[tokio::test]
async fn zsh_and_fish_take_their_completions() {
    let spec = offline();
    for (shell, check) in [("zsh", "-n"), ("fish", "--no-execute")] {
        let script = spec.run_ok(&["completions", shell]).await.stdout;
        assert!(script.contains("healthcheck"), "{shell}: {script}");
        let file = spec.folder().join(shell);
        std::fs::write(&file, script).unwrap();
        if let Some(output) = program(Command::new(shell).arg(check).arg(&file)) {
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        }
    }
}

#[tokio::test]
async fn the_manual_page_has_every_command_and_section() {
    let spec = offline();
    let page = spec.run_ok(&["man"]).await.stdout;
    let sections =
        ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "EXIT STATUS", "SIGNALS", "ENVIRONMENT", "FILES"];
    for section in sections {
        let quoted = format!(".SH \"{section}\"\n");
        assert!(page.contains(&quoted) || page.contains(&format!(".SH {section}\n")), "{section} in {page}");
    }
    let help = spec.run_ok(&["--help"]).await.stdout;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"run"), "{help}");
    for command in commands.into_iter().filter(|command| *command != "help") {
        assert!(page.contains(&format!(".SS \"{command}")), "{command} in {page}");
    }
    let file = spec.folder().join("order-processor.1");
    std::fs::write(&file, page).unwrap();
    if let Some(output) = program(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(&file)) {
        // A date would be that of the last change to the text, which nobody would keep.
        let complaints = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaints: Vec<_> = complaints.lines().filter(|line| !line.contains("missing date")).collect();
        assert!(complaints.is_empty(), "{complaints:?}");
    }
    if let Some(output) = program(Command::new("man").args(["--warnings", "-l"]).arg(&file).env("MANWIDTH", "80")) {
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}

#[tokio::test]
async fn completions_and_manual_need_no_settings_and_bear_a_reader_that_leaves() {
    let spec = offline().set("nats.url", "");
    assert_eq!(spec.run(&["config"]).await.code, Some(2), "these settings are wrong");
    spec.run_ok(&["man"]).await;
    let mut child = spec.command(&["completions", "zsh"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A terminal of a real kind, with a command in it. It ends with this value.
struct Tmux {
    socket: PathBuf,
}

impl Tmux {
    /// `None` where tmux is not installed.
    fn start(spec: &DaemonSpec, arguments: &[&str], size: (u16, u16)) -> Option<Self> {
        let command = spec.command(arguments);
        let mut script = String::from("#!/bin/sh\n");
        for (name, value) in command.get_envs() {
            writeln!(script, "export {}='{}'", name.display(), value.unwrap_or_default().display()).unwrap();
        }
        let quoted: Vec<String> = command.get_args().map(|argument| format!("'{}'", argument.display())).collect();
        let program = command.get_program().display().to_string();
        writeln!(script, "'{program}' {}; echo ended with $?; stty -a; exec cat", quoted.join(" ")).unwrap();
        let file = spec.folder().join("in-tmux.sh");
        std::fs::write(&file, script).unwrap();
        let tmux = Self { socket: spec.folder().join("tmux.sock") };
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let mut new =
            tmux.command(&["-f", "/dev/null", "new-session", "-d", "-s", "view", "-x", &width, "-y", &height]);
        let output = self::program(new.arg("sh").arg(&file).current_dir(spec.folder()))?;
        assert!(output.status.success(), "{output:?}");
        Some(tmux)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(&self.socket).args(arguments).env("LC_ALL", "C.UTF-8");
        command
    }

    fn ask(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).stdin(Stdio::null()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Waits until the screen shows all of these.
    async fn shows(&self, words: &[&str]) -> String {
        eventually(&format!("a screen with {words:?}"), PATIENCE, async || {
            let screen = self.ask(&["capture-pane", "-p", "-t", "view"]);
            if words.iter().all(|word| screen.contains(word)) { Ok(screen) } else { Err(screen) }
        })
        .await
    }

    fn resize(&self, width: u16, height: u16) {
        self.ask(&["resize-window", "-t", "view", "-x", &width.to_string(), "-y", &height.to_string()]);
    }

    /// The command is over, and the terminal is as it was.
    async fn left_clean(&self) {
        let screen = self.shows(&["ended with 0", "icanon"]).await;
        assert!(!screen.contains("-icanon") && !screen.contains("-echo "), "{screen}");
        let flags = self.ask(&["display-message", "-p", "-t", "view", "#{alternate_on} #{cursor_flag}"]);
        assert_eq!(flags.trim(), "0 1", "no other screen, and a cursor");
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.ask(&["kill-server"]);
    }
}

#[tokio::test]
async fn the_live_view_outlives_daemon_and_server_and_fits_every_size() {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    let Some(tmux) = Tmux::start(&spec, &["status", "--watch", "--interval", "200ms"], (80, 24)) else { return };
    tmux.shows(&["not running", "ack floor 0 of 5", "5 to deliver", "no database at"]).await;

    let mut worker = spec.start();
    let screen =
        tmux.shows(&["daemon        ready", "ack floor 5 of 5, 100 %", "dead letters  0", "daemon ready"]).await;
    assert!(screen.lines().count() <= 24, "{screen}");
    worker.drain().await;
    tmux.shows(&["daemon        not running"]).await;

    tmux.resize(200, 50);
    server.stop().await;
    tmux.shows(&["problem       the server at", "ack floor not known", "processed     5 ids"]).await;
    server.restart().await;
    tmux.shows(&["over: the server at", "ack floor 5 of 5"]).await;
    tmux.resize(30, 8);
    tmux.shows(&["30x8 is too small"]).await;
    tmux.resize(80, 24);
    tmux.shows(&["ack floor 5 of 5"]).await;
    tmux.ask(&["send-keys", "-t", "view", "q"]);
    tmux.left_clean().await;
}

#[tokio::test]
async fn ctrl_c_ends_the_live_view_while_the_server_does_not_answer() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let Some(tmux) = Tmux::start(&spec, &["status", "--watch", "--interval", "200ms"], (80, 24)) else { return };
    tmux.shows(&["not running"]).await;
    server.freeze();
    tmux.ask(&["send-keys", "-t", "view", "C-c"]);
    tmux.left_clean().await;
    server.thaw();
}

#[tokio::test]
async fn a_no_on_the_terminal_deletes_and_discards_nothing_and_says_so() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let Some(tmux) = Tmux::start(&spec, &["teardown"], (100, 24)) else { return };
    tmux.shows(&["Type its name to confirm:"]).await;
    tmux.ask(&["send-keys", "-t", "view", "ORDER", "Enter"]);
    tmux.shows(&["order-processor: nothing was changed", "ended with 1"]).await;
    drop(tmux);
    assert_eq!(broker.stream_info().await.state.messages, 0, "the stream is there");

    let spec = spec.set("inbox.id_pointer", "/id");
    broker.publish("no JSON").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let Some(tmux) = Tmux::start(&spec, &["dead-letters", "discard", "--all"], (100, 24)) else { return };
    tmux.shows(&["Type yes to confirm:"]).await;
    tmux.ask(&["send-keys", "-t", "view", "n", "Enter"]);
    tmux.shows(&["order-processor: nothing was discarded", "ended with 1"]).await;
    assert_eq!(spec.db().count("dead_letters").await, 1);
}

#[tokio::test]
async fn without_a_terminal_the_watch_prints_a_line_each_time() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut watch = spec.start_with(&["status", "--watch", "--interval", "100ms"]);
    let lines = eventually("three lines", PATIENCE, async || {
        let printed = watch.printed();
        at_least(printed.lines().count(), 3).map(|_| printed)
    })
    .await;
    assert!(lines.lines().all(|line| line.starts_with("ack floor 0 of 0, pending 0")), "{lines}");
    assert!(lines.contains("daemon not running") && !lines.contains('\u{1b}'), "{lines}");
    watch.kill9();
}

#[tokio::test]
async fn the_status_tells_what_the_daemon_knows_of_itself() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let text = spec.run(&["status"]).await.stdout;
    assert!(text.contains("daemon        not running\n"), "{text}");

    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    let text = spec.run_ok(&["status"]).await.stdout;
    assert!(text.contains("daemon        ready; version ") && text.contains(", 1 messages in "), "{text}");
    let status = spec.run_ok(&["status", "--json"]).await.json();
    assert_eq!((&status["daemon"]["ready"], &status["daemon"]["last_batch_messages"]), (&true.into(), &1.into()));

    broker.delete_stream().await;
    worker.not_ready("stream ORDERS").await;
    let text = spec.run(&["status"]).await.stdout;
    assert!(text.contains("daemon        not ready: consumer: stream ORDERS existed when"), "{text}");
    worker.drain().await;
}

#[tokio::test]
async fn a_live_view_whose_terminal_goes_away_ends() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let Some(tmux) = Tmux::start(&spec, &["status", "--watch"], (80, 24)) else { return };
    tmux.shows(&["not running"]).await;
    let pid = tmux.ask(&["display-message", "-p", "-t", "view", "#{pane_pid}"]);
    let pid = pid.trim();
    let child = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap().trim().to_owned();
    assert_ne!(child, "", "the view is a child of the shell in the terminal");
    drop(tmux);
    eventually("the view has ended", PATIENCE, async || {
        if PathBuf::from(format!("/proc/{child}")).exists() { Err("still running") } else { Ok(()) }
    })
    .await;
}
