//! The rules of the house that no compiler holds: arrows between rooms, who may name the client and the dialect, lengths, words,
//! and that each test, metric, setting and command that a text names exists. `docs` holds the links and console blocks.
//!
//! A failure names the place and what to write instead.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A room uses only rooms of a lower number. `lib.rs` and `main.rs` are the map and the door, and use any.
const ROOMS: [(&str, u8); 8] = [
    ("model", 0),
    ("config", 0),
    ("store", 1),
    ("telemetry", 2),
    ("jetstream", 3),
    ("handler", 3),
    ("worker", 4),
    ("ops", 5),
];
/// Who may name the client of the server: its room, the commands that change the server, and the settings, which take what the
/// client takes for an address.
const CLIENT: [&str; 5] =
    ["src/jetstream", "src/ops/setup", "src/ops/teardown.rs", "src/ops/publish.rs", "src/config/parse.rs"];
/// Who may name the driver of the database: the store, and handlers, which users write in SQL.
const DRIVER: [&str; 3] = ["src/store", "src/handler", "src/lib.rs"];
const FUNCTION_LINES_MAX: usize = 70;
/// The module carries the subject.
const TEST_NAME_MAX: usize = 75;
/// Without unit tests, which stand at the end of a file.
const FILE_LINES_MAX: usize = 400;
/// How the head of a longer file begins the sentence that gives the reason.
const LONGER: &str = "//! Longer than most files:";
/// Words that readers stumble over, what to write, and what may follow the word so that it means something else.
const WORDS: [(&str, &str, &str); 7] = [
    ("anew", "again, or recreated", "?"),
    ("for one", "for example", " "),
    ("is no", "is not", "?"),
    ("is none", "is not, or there are none", "?"),
    ("no more", "no longer", " than"),
    ("any more", "no longer", " than"),
    ("let us in", "accept the credentials", "?"),
];

/// Types of one name in several modules: the arm of a database beside the enum that has it, and the error of a room, which is always
/// named with its room.
const NAMED_TWICE: [&str; 4] = ["Store", "Tx", "Reader", "Error"];

/// Misspelt on purpose, in examples of what the program says about it.
const MISSPELT: [&str; 2] = ["nats.ulr", "nats.password"];

/// One file of the repository.
struct Source {
    /// As it is named from the root.
    name: String,
    lines: Vec<String>,
}

/// What is wrong: in which file, at which line, and what to do.
struct Complaint {
    name: String,
    line: usize,
    what: String,
}

impl Source {
    fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        Self { name, lines: text.lines().map(str::to_owned).collect() }
    }

    fn numbered(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.lines.iter().map(String::as_str))
    }

    /// The lines without their comments and texts.
    fn code(&self) -> impl Iterator<Item = (usize, String)> {
        self.numbered().map(|(number, line)| {
            let code: String = line.replace("\\\"", "").split('"').step_by(2).collect::<Vec<_>>().join("\"\"");
            (number, code.split_once("//").map_or(code.as_str(), |(code, _)| code).to_owned())
        })
    }

    /// The text for readers: all of a page, the comments of a source, line by line.
    fn prose(&self) -> impl Iterator<Item = (usize, &str)> {
        let rust = self.name.ends_with(".rs");
        let lines = self.numbered().map(move |(number, line)| match line.split_once("//") {
            Some((_, comment)) if rust => (number, comment),
            _ => (number, if rust { "" } else { line }),
        });
        lines.filter(|(_, text)| !text.is_empty())
    }

    fn room(&self) -> Option<&str> {
        let path = self.name.strip_prefix("src/")?;
        let name = path.split('/').next().unwrap_or(path);
        Some(name.strip_suffix(".rs").unwrap_or(name))
    }

    fn is_in(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.name.starts_with(place))
    }

    fn complain(&self, line: usize, what: impl Into<String>) -> Complaint {
        Complaint { name: self.name.clone(), line, what: what.into() }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files under these folders whose names end like this.
fn sources(folders: &[&str], endings: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut left: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
            found.push(Source::read(&path));
        }
    }
    assert!(!found.is_empty(), "nothing in {folders:?}");
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

fn code() -> Vec<Source> {
    sources(&["src"], &[".rs"])
}

/// Everything that people read about the program.
fn texts() -> Vec<Source> {
    let folders = ["README.md", "docs", "tests", "benches", "fuzz", "deploy", "src", "config"];
    sources(&folders, &[".md", ".rs", ".yml", ".yaml", ".toml", ".service"])
}

/// Fails with all complaints.
fn settle(rule: &str, complaints: &[Complaint]) {
    let mut said = String::new();
    for Complaint { name, line, what } in complaints {
        writeln!(said, "{name}:{line}: {what}").unwrap();
    }
    assert!(said.is_empty(), "{rule}:\n{said}");
}

#[test]
fn a_room_uses_only_rooms_of_a_lower_number() {
    let number = |room: &str| ROOMS.iter().find(|(name, _)| *name == room).map(|(_, number)| *number);
    let mut complaints = Vec::new();
    for source in code() {
        let room = source.room().expect("it is in src");
        if ["lib", "main"].contains(&room) {
            continue;
        }
        let own = number(room);
        if own.is_none() {
            complaints.push(source.complain(1, format!("{room} is not a room; the rooms are in tests/it/tidy.rs")));
        }
        for (line, text) in source.code() {
            for used in after(&text, "crate::") {
                if used != room && number(used).is_some_and(|used| Some(used) >= own) {
                    let what =
                        format!("{room} must not use {used}; move what both need to a room below, or pass it in");
                    complaints.push(source.complain(line, what));
                }
            }
            if text.contains("super::super::") || text.contains("crate::{") {
                complaints
                    .push(source.complain(line, "write one `use crate::room::..` a room, so that arrows are seen"));
            }
        }
    }
    settle("rooms", &complaints);
}

/// The identifiers right after each `mark`.
fn after<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
    let ends = text.match_indices(mark).map(|(at, _)| &text[at + mark.len()..]);
    ends.map(|rest| &rest[..rest.find(|c: char| !is_name(c)).unwrap_or(rest.len())]).collect()
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[test]
fn only_their_own_rooms_name_the_client_and_the_driver() {
    let mut complaints = Vec::new();
    for source in code() {
        for (line, text) in source.code() {
            if text.contains("async_nats::") && !source.is_in(&CLIENT) {
                complaints.push(source.complain(line, "only jetstream names async_nats; ask jetstream for it"));
            }
            if ["sqlx::", "store::sqlite", "sqlite::"].iter().any(|name| text.contains(name)) && !source.is_in(&DRIVER)
            {
                complaints
                    .push(source.complain(line, "only store names a dialect; use a type or a function of `store`"));
            }
            if (text.contains(".await") || text.contains("async fn")) && source.is_in(&["src/model"]) {
                complaints.push(source.complain(line, "model holds data; what waits belongs into another room"));
            }
        }
    }
    settle("names", &complaints);
}

#[test]
fn each_type_has_a_name_of_its_own() {
    let mut complaints = Vec::new();
    let mut declared: HashMap<String, String> = HashMap::new();
    for source in code() {
        let kinds = ["struct ", "enum ", "trait ", "type "];
        for (line, text) in source.numbered().take_while(|(_, text)| *text != "#[cfg(test)]") {
            let text = text.strip_prefix("pub ").or(text.strip_prefix("pub(super) ")).unwrap_or(text);
            let Some(kind) = kinds.iter().find(|kind| text.starts_with(**kind)) else { continue };
            let name = after(text, kind)[0].to_owned();
            if !NAMED_TWICE.contains(&name.as_str())
                && let Some(other) = declared.insert(name.clone(), source.name.clone())
            {
                complaints.push(source.complain(line, format!("{other} has a type {name} too; say what this one is")));
            }
        }
    }
    assert!(declared.len() > 100, "{declared:?}");
    settle("names of types", &complaints);
}

#[test]
fn functions_and_files_are_short_or_say_why() {
    let mut complaints = Vec::new();
    for source in sources(&["src", "tests", "benches", "fuzz", "build.rs"], &[".rs"]) {
        let mut open: Option<(usize, String)> = None;
        for (line, text) in source.numbered() {
            let indent = &text[..text.len() - text.trim_start().len()];
            if text.trim_start().split(' ').take(4).any(|word| word == "fn") && !text.trim_start().starts_with("//") {
                open = Some((line, format!("{indent}}}")));
            } else if let Some((began, _)) = open.as_ref().filter(|(_, end)| text == end) {
                let lines = line + 1 - began;
                if lines > FUNCTION_LINES_MAX {
                    let what =
                        format!("a function of {lines} lines; {FUNCTION_LINES_MAX} are the most, so take a step out");
                    complaints.push(source.complain(*began, what));
                }
                open = None;
            }
        }
        let tests = source.lines.iter().position(|line| line == "#[cfg(test)]").unwrap_or(source.lines.len());
        let explained = source.lines.iter().any(|line| line.starts_with(LONGER));
        if source.is_in(&["src"]) && tests > FILE_LINES_MAX && !explained && source.name != "src/config/tests.rs" {
            let what = format!("{tests} lines; split the file, or give the reason in its head after `{LONGER}`");
            complaints.push(source.complain(1, what));
        }
    }
    settle("lengths", &complaints);
}

#[test]
fn texts_use_plain_words() {
    let mut complaints = Vec::new();
    for source in code() {
        for (line, text) in source.numbered() {
            let text = text.to_lowercase();
            for (word, instead, but) in WORDS {
                let found = text.match_indices(word).any(|(at, _)| {
                    let (before, behind) = (&text[..at], &text[at + word.len()..]);
                    let is_whole = !before.ends_with(is_name) && !behind.starts_with(is_name);
                    is_whole && !before.ends_with("there ") && !behind.starts_with(but)
                });
                if found {
                    complaints.push(source.complain(line, format!("{word:?}: write {instead}")));
                }
            }
        }
    }
    settle("words", &complaints);
}

/// The full paths of all tests, each with its module.
fn tests() -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    for source in sources(&["src", "tests/it"], &[".rs"]) {
        let path = source.name.trim_start_matches("src/").trim_start_matches("tests/it/");
        let module = path.trim_end_matches(".rs").trim_end_matches("/mod").replace('/', "::");
        let inner = source.lines.iter().any(|line| line.starts_with("mod tests {"));
        let module = if inner { format!("{module}::tests") } else { module };
        let mut marked = false;
        for (_, text) in source.code() {
            marked |= text.trim_start().starts_with("#[test]") || text.trim_start().starts_with("#[tokio::test");
            if let Some(name) = after(&text, "fn ").first().filter(|_| marked) {
                tests.insert(format!("{module}::{name}"));
                marked = false;
            }
        }
    }
    tests
}

/// Is it this name, with `*` for anything?
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name
            .strip_prefix(start)
            .is_some_and(|name| (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))),
    }
}

/// What stands between backticks.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn each_test_that_a_text_names_exists() {
    let tests = tests();
    let themes: BTreeSet<&str> = tests.iter().filter_map(|test| test.split("::").next()).collect();
    let rooms: Vec<&str> = ROOMS.iter().map(|(room, _)| *room).collect();
    let mut complaints = Vec::new();
    for source in texts() {
        for (line, text) in source.prose() {
            for span in spans(text) {
                let is_path = span.contains("::") && span.chars().all(|c| is_name(c) || c == ':' || c == '*');
                let theme = span.split("::").next().unwrap_or_default();
                let of_tests = span.contains('*')
                    || span.ends_with("::tests")
                    || themes.contains(theme) && !rooms.contains(&theme);
                if !is_path || !of_tests || span.contains(char::is_uppercase) {
                    continue;
                }
                let wanted = if span.ends_with("::tests") { format!("{span}::*") } else { span.to_owned() };
                let inner = format!("*::{wanted}");
                if !tests.iter().any(|test| matches(&wanted, test) || matches(&inner, test)) {
                    complaints.push(source.complain(line, format!("no test is named {span}; name one that exists")));
                }
            }
        }
    }
    settle("tests", &complaints);
}

#[test]
fn names_of_tests_are_short_enough_to_be_read() {
    let name = |test: &str| test.rsplit("::").next().unwrap_or(test).to_owned();
    let long: Vec<_> = tests().into_iter().filter(|test| name(test).len() > TEST_NAME_MAX).collect();
    assert!(long.is_empty(), "over {TEST_NAME_MAX} characters; let the module carry the subject: {long:#?}");
}

/// The keys of all settings.
fn settings() -> BTreeSet<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_order-processor"));
    let output = command.args(["config", "--json"]).env_clear().output().unwrap();
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    rows.iter().map(|row| row["key"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn each_metric_and_setting_that_a_text_names_exists() {
    let read = |path| std::fs::read_to_string(root().join(path)).unwrap();
    let metrics = ["src/telemetry/metrics.rs", "src/telemetry/calls.rs"].map(read).concat();
    let metrics: BTreeSet<&str> = metrics.split('"').filter(|text| text.starts_with("order_processor_")).collect();
    let settings = settings();
    let known = |key: &str| {
        let section = format!("{key}.");
        settings.contains(key) || settings.iter().any(|known| known.starts_with(&section)) || MISSPELT.contains(&key)
    };
    let sections: BTreeSet<&str> = settings.iter().filter_map(|key| key.split('.').next()).collect();
    let mut complaints = Vec::new();
    for source in texts() {
        for (line, text) in source.numbered() {
            for name in after(text, "order_processor_")
                .into_iter()
                .filter(|rest| !rest.contains("__") && !rest.starts_with('_') && !rest.is_empty())
            {
                let full = format!("order_processor_{name}");
                let whole =
                    ["_bucket", "_sum", "_count"].iter().find_map(|end| full.strip_suffix(end)).unwrap_or(&full);
                if !metrics.contains(full.as_str()) && !metrics.contains(whole) {
                    complaints.push(
                        source.complain(line, format!("no metric is named {full}; see docs/reference/metrics.md")),
                    );
                }
            }
        }
        for (line, text) in source.prose() {
            for span in spans(text) {
                let key = span.split([' ', '=']).next().unwrap_or_default();
                let is_key = key.contains('.')
                    && key.chars().all(|c| is_name(c) || c == '.')
                    && ![".rs", ".toml"].iter().any(|end| key.ends_with(end));
                let section = key.split('.').next().unwrap_or_default();
                if is_key && sections.contains(section) && !known(key) {
                    complaints
                        .push(source.complain(line, format!("no setting is named {key}; see config/default.toml")));
                }
            }
        }
    }
    settle("metrics and settings", &complaints);
}

/// The commands that a `--help` lists, and its text. `None`: there is no such command.
fn help(arguments: &[&str]) -> Option<(BTreeSet<String>, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_order-processor")).args(arguments).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands = lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    output.status.success().then_some((commands, help))
}

/// What is wrong with what somebody types after the program's name.
fn misused(words: &[&str]) -> Option<String> {
    let is_word =
        |word: &str| word.starts_with(|c: char| c.is_ascii_lowercase()) && !word.contains(['.', '_', '/', ':']);
    let command = words.first().filter(|word| is_word(word))?;
    let Some((inner, text)) = help(&[command]) else {
        return Some(format!("no command is named {command}; see docs/reference/commands.md"));
    };
    let second = words.get(1).filter(|second| inner.contains(**second));
    let text = second.and_then(|second| help(&[command, second])).map_or(text, |(_, text)| text);
    let unknown = words.iter().find(|word| word.starts_with("--") && !text.contains(**word))?;
    Some(format!("{command} has no option {unknown}; see its --help"))
}

#[test]
fn each_command_and_option_that_a_text_names_exists() {
    let mut complaints = Vec::new();
    for source in texts() {
        for (line, text) in source.numbered() {
            let typed = text.trim_start().strip_prefix("$ ").into_iter().chain(spans(text));
            let typed = typed.flat_map(|typed| typed.split([';', '&', '|']));
            for words in typed.filter_map(|typed| typed.trim_start().strip_prefix("order-processor ")) {
                let words: Vec<&str> = words.split([' ', '=', ']', '[', ',']).filter(|word| !word.is_empty()).collect();
                complaints.extend(misused(&words).map(|what| source.complain(line, what)));
            }
        }
    }
    settle("commands", &complaints);
}
