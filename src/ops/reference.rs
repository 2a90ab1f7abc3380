//! `reference`: the pages of `docs/reference` that follow from the code. A test compares them with the files.

use std::fmt::{self, Write as _};
use std::io::{self, Write};

use clap::builder::ValueRange;
use clap::{Arg, Command, ValueEnum};

use crate::config;
use crate::telemetry::calls::HOST;
use crate::telemetry::metrics::Metrics;

#[derive(Debug, clap::Args)]
pub struct ReferenceArgs {
    /// The page to print, as Markdown
    #[arg(value_enum)]
    page: Page,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Page {
    Settings,
    Commands,
    Metrics,
}

pub fn run(command: Command, args: &ReferenceArgs, out: &mut impl Write) -> io::Result<()> {
    let mut page = String::new();
    let written = match args.page {
        Page::Settings => settings(&mut page, config::DEFAULT_TOML),
        Page::Commands => commands(&mut page, command),
        Page::Metrics => {
            let exposed = Metrics::new();
            // Only a daemon whose handler calls has a host.
            drop(exposed.host(""));
            metrics(&mut page, &exposed.render())
        }
    };
    written.map_err(io::Error::other)?;
    out.write_all(page.as_bytes())
}

/// Keys that stand together in the file under one comment are one section of the page.
fn settings(page: &mut String, file: &str) -> fmt::Result {
    let (mut section, mut comment, mut keys) = (String::new(), Vec::new(), Vec::new());
    writeln!(page, "# Settings\n\nThe texts are those of `config/default.toml`.\n")?;
    // An empty line more, so that the last keys end as all others do.
    for line in file.lines().chain([""]) {
        let is_key = line.contains(" = ") && !line.starts_with("# ");
        if !is_key && !keys.is_empty() {
            group(page, &section, &comment, &keys)?;
            comment.clear();
            keys.clear();
        }
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
            writeln!(page, "## `[{section}]`\n")?;
        } else if is_key {
            keys.push(line);
        } else if section.is_empty() && line.is_empty() && !comment.is_empty() {
            // The head of the file.
            writeln!(page, "{}\n", comment.join("\n"))?;
            comment.clear();
        } else if let Some(text) = line.strip_prefix('#') {
            comment.push(text.strip_prefix(' ').unwrap_or(text));
        }
    }
    // The last section ends the page, without an empty line after it.
    page.truncate(page.trim_end().len());
    writeln!(page)
}

fn group(page: &mut String, section: &str, comment: &[&str], keys: &[&str]) -> fmt::Result {
    let parsed: Vec<(&str, &str, bool)> = keys
        .iter()
        .filter_map(|line| {
            let (key, value) = line.trim_start_matches('#').split_once(" = ")?;
            Some((key, value, line.starts_with('#')))
        })
        .collect();
    let names: Vec<String> = parsed.iter().map(|(key, _, _)| format!("`{section}.{key}`")).collect();
    writeln!(page, "### {}\n\n{}\n", names.join(", "), comment.join("\n"))?;
    writeln!(page, "| key | default | environment |\n|---|---|---|")?;
    for (key, value, is_optional) in parsed {
        let default = if is_optional { format!("none; for example `{value}`") } else { format!("`{value}`") };
        let variable = format!("ORDER_PROCESSOR__{section}__{key}").replace('.', "__").to_uppercase();
        writeln!(page, "| `{key}` | {default} | `{variable}` |")?;
    }
    writeln!(page)
}

fn commands(page: &mut String, mut command: Command) -> fmt::Result {
    command.build();
    writeln!(page, "# Commands\n")?;
    writeln!(page, "`order-processor [--config FILE] COMMAND`. Each command has `--help`.")?;
    writeln!(page, "[Exit codes](exit-codes.md) has the codes of each command.\n")?;
    options(page, &command, |_| true)?;
    describe(page, &command, "")
}

/// One section for each command that can be given, those below another one included.
fn describe(page: &mut String, parent: &Command, path: &str) -> fmt::Result {
    for command in parent.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help") {
        let path = format!("{path} {}", command.get_name());
        if command.has_subcommands() {
            describe(page, command, &path)?;
            continue;
        }
        writeln!(page, "\n## {}\n", path.trim_start())?;
        writeln!(page, "{}.\n", command.get_about().map(ToString::to_string).unwrap_or_default())?;
        let usage = command.clone().render_usage().to_string();
        writeln!(page, "```text\n{}\n```", usage.trim_start_matches("Usage: "))?;
        if command.get_arguments().any(|arg| !arg.is_global_set() && !is_general(arg)) {
            writeln!(page)?;
            options(page, command, |arg| !arg.is_global_set())?;
        }
        if let Some(more) = command.get_after_help() {
            writeln!(page, "\n{more}")?;
        }
    }
    Ok(())
}

fn options(page: &mut String, command: &Command, wanted: impl Fn(&Arg) -> bool) -> fmt::Result {
    writeln!(page, "| option | default | meaning |\n|---|---|---|")?;
    for arg in command.get_arguments().filter(|arg| wanted(arg) && !is_general(arg)) {
        let values =
            arg.get_value_names().unwrap_or_default().iter().map(|name| format!("{name} ")).collect::<String>();
        let takes_value = arg.get_num_args().is_some_and(|number: ValueRange| number.takes_values());
        let name = match (arg.get_long(), takes_value) {
            (Some(long), true) => format!("`--{long} {}`", values.trim_end()),
            (Some(long), false) => format!("`--{long}`"),
            (None, _) => format!("`{}`", values.trim_end()),
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        // Defaults that depend on something stand in the help text.
        let (help, described) = match help.split_once(" [default: ") {
            Some((help, default)) => (help.to_owned(), default.trim_end_matches(']').to_owned()),
            None => (help, String::new()),
        };
        let fixed = arg.get_default_values().iter().map(|value| value.to_string_lossy());
        let default = if takes_value { fixed.chain([described.into()]).collect::<String>() } else { String::new() };
        let possible: Vec<String> = match takes_value && !arg.is_hide_possible_values_set() {
            true => arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect(),
            false => Vec::new(),
        };
        let possible = if possible.is_empty() { String::new() } else { format!(": {}", possible.join(", ")) };
        writeln!(page, "| {name} | {} | {}{possible} |", default.replace('|', "\\|"), help.replace('|', "\\|"))?;
    }
    Ok(())
}

/// What every command has.
fn is_general(arg: &Arg) -> bool {
    ["help", "version"].contains(&arg.get_id().as_str())
}

/// `exposed`: what `/metrics` answers before anything has happened. By name, for the exposition has no order of its own.
fn metrics(page: &mut String, exposed: &str) -> fmt::Result {
    const PREFIX: &str = "order_processor_";
    writeln!(page, "# Metrics\n")?;
    writeln!(
        page,
        "Every name begins with `{PREFIX}`. Every metric is exposed from the start, those with a `host` if the handler calls it. No label has an id."
    )?;
    writeln!(page, "The figures of the process itself (`process_*`) are there too.")?;
    for (kind, title) in [("counter", "Counters"), ("gauge", "Gauges"), ("histogram", "Histograms")] {
        writeln!(page, "\n## {title}\n\n| metric | labels | meaning |\n|---|---|---|")?;
        let mut names: Vec<&str> = exposed
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_prefix(PREFIX)?.strip_suffix(kind))
            .map(str::trim_end)
            .collect();
        names.sort_unstable();
        for name in names {
            let help = format!("# HELP {PREFIX}{name} ");
            let help = exposed.lines().find_map(|line| line.strip_prefix(help.as_str())).unwrap_or_default();
            writeln!(
                page,
                "| `{name}` | {} | {help} |",
                labels(exposed, &format!("{PREFIX}{name}{}{{", if kind == "histogram" { "_count" } else { "" }))
            )?;
        }
    }
    Ok(())
}

/// The label of a metric, and its values.
fn labels(exposed: &str, series: &str) -> String {
    let labels =
        exposed.lines().filter_map(|line| line.strip_prefix(series)?.split_once('}')).map(|(labels, _)| labels);
    let mut found: Vec<(&str, &str)> = labels.filter_map(|label| label.split_once('=')).collect();
    found.sort_unstable();
    let Some((key, _)) = found.first() else { return String::new() };
    if *key == HOST {
        // The hosts are those of the handler file. A second label of such a metric is in its help text.
        return format!("`{key}`");
    }
    let values: Vec<&str> = found.iter().map(|(_, value)| value.trim_matches('"')).collect();
    format!("`{key}`: {}", values.join(", "))
}
