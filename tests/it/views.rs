//! What operators look at and type: the live status, completions and the manual page.

use std::process::{Command, Output, Stdio};

use crate::support::DaemonSpec;

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
async fn the_manual_page_renders_without_a_warning_and_has_every_command_and_section() {
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
