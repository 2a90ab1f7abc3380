//! README.md and `docs/` are true: each `console` block prints what the page shows, each link leads somewhere, and the runbook
//! has every alert and quotes texts that the program has. `UPDATE_DOCS=1` rewrites what the binary can write by itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use order_processor::model::label::Label;
use order_processor::model::outcome::{OutcomeKind, Reason};
use order_processor::telemetry::status::Component;

use crate::auth;
use crate::support::{DaemonSpec, NatsServer};
use session::{ConsoleSession, Step, steps};

mod session;

/// Longer lines are hard to read on a terminal and in a diff. Tables, code and links cannot be broken.
const COLUMNS_MAX: usize = 100;
const README_LINES_MAX: usize = 180;
/// The pages of `docs/reference` that the binary prints.
const PRINTED: [&str; 3] = ["settings", "commands", "metrics"];
const UPDATE: &str = "run `make docs`";

struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn read(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path, text }
    }

    /// As the sources name it.
    fn name(&self) -> String {
        self.path.strip_prefix(root()).unwrap_or(&self.path).display().to_string()
    }

    /// The lines outside of code blocks and comments, with their numbers.
    fn prose(&self) -> Vec<(usize, &str)> {
        let (mut code, mut comment) = (false, false);
        let lines = (1..).zip(self.text.lines()).filter(|(_, line)| {
            let was_code = code;
            code ^= line.trim_start().starts_with("```");
            comment |= line.starts_with("<!--") && !code;
            let is_prose = !code && !was_code && !comment;
            comment &= !line.ends_with("-->");
            is_prose
        });
        lines.collect()
    }

    fn headings(&self) -> Vec<&str> {
        self.prose().into_iter().filter(|(_, line)| line.starts_with('#')).map(|(_, line)| line).collect()
    }

    fn anchors(&self) -> Vec<String> {
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let anchors = self.headings().into_iter().map(|heading| {
            let slug = slug(heading.trim_start_matches('#').trim());
            let before = seen.entry(slug.clone()).and_modify(|before| *before += 1).or_default();
            if *before == 0 { slug } else { format!("{slug}-{before}") }
        });
        anchors.collect()
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn pages() -> Vec<Page> {
    let mut paths = vec![root().join("README.md")];
    paths.extend(files(&root().join("docs"), "md"));
    paths.into_iter().map(Page::read).collect()
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|is| is == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// As GitHub and mdBook make anchors of headings.
fn slug(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(|c: char| !c.is_alphanumeric() && !" -_".contains(c), "");
    kept.replace(' ', "-")
}

fn updates() -> bool {
    std::env::var_os("UPDATE_DOCS").is_some()
}

#[tokio::test]
async fn each_console_block_prints_what_its_page_shows() {
    for program in ["bash", "curl", "sqlite3"] {
        if std::process::Command::new(program).arg("--version").output().is_err() {
            eprintln!("NOT TESTED: {program} is not installed");
            return;
        }
    }
    let mut plays = Vec::new();
    for page in pages() {
        let steps = steps(&page.text);
        if !steps.is_empty() {
            let server = NatsServer::start().await;
            plays.push((page.path.clone(), std::thread::spawn(move || play(&page, &steps, &server))));
        }
    }
    assert!(!plays.is_empty());
    let mut complaints = Vec::new();
    for (path, play) in plays {
        complaints.extend(play.join().unwrap_or_else(|_| vec![format!("{}: panicked", path.display())]));
    }
    assert!(complaints.is_empty(), "{}\n\nif the new output is right, {UPDATE}", complaints.join("\n\n"));
}

/// Types the blocks of one page, and returns what was not as shown.
fn play(page: &Page, steps: &[Step], server: &NatsServer) -> Vec<String> {
    let mut session = ConsoleSession::new(server.address());
    let mut complaints = Vec::new();
    let mut lines: Vec<String> = page.text.lines().map(ToOwned::to_owned).collect();
    // From the last to the first, so that the places of the others stay.
    let mut edits: Vec<(&Step, Vec<String>)> = Vec::new();
    for step in steps {
        let Err(printed) = session.play(step) else { continue };
        let elided = step.shown.iter().any(|line| line.ends_with("..."));
        // Where the page shows no output, a failure is not what it should show.
        let failed = session.failed() && step.shown.iter().all(String::is_empty);
        if updates() && !failed && !elided && step.command != "^C" && !step.command.contains("order-processor run") {
            edits.push((step, printed));
            continue;
        }
        complaints.push(format!(
            "{}, line {}: $ {}\nshows:\n{}\nprints:\n{}\nand the daemon has logged:\n{}",
            page.name(),
            step.at,
            step.command,
            step.shown.join("\n"),
            printed.join("\n"),
            session.log()
        ));
    }
    for (step, printed) in edits.into_iter().rev() {
        lines.splice(step.at..step.at + step.shown.len(), printed);
    }
    if updates() && lines.join("\n") + "\n" != page.text {
        std::fs::write(&page.path, lines.join("\n") + "\n").unwrap();
    }
    complaints
}

#[test]
fn each_link_and_anchor_leads_somewhere() {
    let pages = pages();
    let mut broken = Vec::new();
    for page in &pages {
        for (number, line) in page.prose() {
            for target in targets(line) {
                if target.contains("://") {
                    continue;
                }
                let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
                let path = if file.is_empty() { page.path.clone() } else { page.path.parent().unwrap().join(file) };
                let anchors = || Page::read(path.clone()).anchors();
                if !path.exists() || (!anchor.is_empty() && !anchors().contains(&anchor.to_owned())) {
                    broken.push(format!("{}, line {number}: {target}", page.name()));
                }
            }
        }
    }
    assert!(broken.is_empty(), "these lead nowhere:\n{}", broken.join("\n"));
}

/// Of `[text](target)` and `![text](target)`.
fn targets(line: &str) -> Vec<&str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

#[test]
fn the_summary_lists_every_page() {
    let summary = Page::read(root().join("docs/SUMMARY.md"));
    let listed: Vec<&str> = summary.text.lines().flat_map(targets).collect();
    for page in files(&root().join("docs"), "md") {
        let name = page.strip_prefix(root().join("docs")).unwrap().display().to_string();
        assert!(name == "SUMMARY.md" || listed.contains(&name.as_str()), "{name} is not in docs/SUMMARY.md");
    }
}

#[test]
fn pages_fit_a_terminal_and_the_readme_a_minute() {
    let mut long = Vec::new();
    let by_hand =
        pages().into_iter().filter(|page| !PRINTED.iter().any(|name| page.path.ends_with(format!("{name}.md"))));
    for page in by_hand {
        for (number, line) in page.prose() {
            if line.chars().count() > COLUMNS_MAX && !line.starts_with('|') {
                long.push(format!("{}, line {number}", page.name()));
            }
        }
    }
    // Wrapping would hide them from git.
    let conflicts: Vec<String> = pages()
        .iter()
        .filter(|page| page.text.contains("<<<<<<<") || page.text.contains(">>>>>>>"))
        .map(Page::name)
        .collect();
    assert!(conflicts.is_empty(), "a merge left its marks in {conflicts:?}");
    assert!(long.is_empty(), "more than {COLUMNS_MAX} columns:\n{}", long.join("\n"));
    assert!(pages()[0].text.lines().count() <= README_LINES_MAX);
}

#[test]
fn each_alert_links_to_its_heading_in_the_runbook() {
    let rules = std::fs::read_to_string(root().join("deploy/prometheus/order-processor.rules.yml")).unwrap();
    let runbook = Page::read(root().join("docs/runbook.md"));
    let anchors = runbook.anchors();
    let blocks: Vec<&str> = rules.split("- alert: ").skip(1).collect();
    assert!(blocks.len() > 10);
    for block in blocks {
        let alert = block.lines().next().unwrap().trim();
        let url = format!("runbook_url: docs/runbook.md#{}", slug(alert));
        assert!(block.contains(&url), "{alert} has no {url}");
        assert!(anchors.contains(&slug(alert)), "docs/runbook.md has no heading {alert}");
    }
}

/// `auth::*` proves that these are enough, and that each is needed.
#[test]
fn the_reference_of_permissions_has_exactly_those_that_are_tested() {
    let page = Page::read(root().join("docs/reference/permissions.md")).text;
    let (tables, rest) = page.split_once("## Commands").unwrap();
    let (_, example) = rest.split_once("## Example").unwrap();
    let (required, optional) = tables.split_once("## Optional").unwrap();
    let named = |text: &str| -> Vec<String> {
        let spans = text.split('`').skip(1).step_by(2).filter(|span| span.starts_with(['$', '_']));
        spans.map(ToOwned::to_owned).collect()
    };
    assert_eq!(named(required), [&auth::PUBLISH[..], &[auth::SUBSCRIBE]].concat());
    assert_eq!(named(optional), auth::OPTIONAL);
    for subject in auth::PUBLISH.iter().chain(&auth::OPTIONAL).chain([&auth::SUBSCRIBE]) {
        assert!(example.contains(&format!("\"{subject}\"")), "the example lacks {subject}");
    }
}

#[test]
fn the_runbook_and_the_reference_have_every_component_of_readyz() {
    let runbook = Page::read(root().join("docs/runbook.md"));
    let reference = Page::read(root().join("docs/reference/http.md")).text;
    for component in Component::ALL.iter().map(|component| component.name()) {
        let heading = format!("### {component}: ");
        assert!(runbook.headings().iter().any(|line| line.starts_with(&heading)), "docs/runbook.md: {component}");
        assert!(reference.contains(&format!("| `{component}` |")), "docs/reference/http.md: {component}");
    }
}

#[test]
fn the_concepts_have_every_outcome_and_every_reason() {
    let concepts = Page::read(root().join("docs/concepts.md")).text;
    for outcome in OutcomeKind::ALL.iter().map(|outcome| outcome.name()) {
        assert!(concepts.contains(&format!("\n| {outcome} |")), "{outcome}");
    }
    for reason in Reason::ALL.iter().map(|reason| reason.name()) {
        assert!(concepts.contains(&format!("\n| `{reason}` |")), "{reason}");
    }
}

/// Headings, and the lists of related texts, quote log lines, `/readyz` and error texts. What differs stands in capitals.
#[test]
fn the_runbook_quotes_texts_that_the_program_has() {
    let sources = sources();
    let mut unknown = Vec::new();
    for quoted in quotes(&Page::read(root().join("docs/runbook.md"))) {
        for part in fixed_parts(&quoted) {
            if !sources.contains(&part) {
                unknown.push(format!("{part:?} of {quoted}"));
            }
        }
    }
    assert!(unknown.is_empty(), "docs/runbook.md quotes what the sources do not have:\n{}", unknown.join("\n"));
}

/// Exit code 2 is for operators, so each of its texts has a section.
#[test]
fn the_runbook_has_every_text_of_a_database_that_cannot_be_opened() {
    let parts: Vec<String> =
        quotes(&Page::read(root().join("docs/runbook.md"))).iter().flat_map(|quoted| fixed_parts(quoted)).collect();
    let source = literals(&Page::read(root().join("src/store/error.rs")).text);
    let (_, variants) = source.split_once("enum OpenError {").unwrap();
    let (variants, _) = variants.split_once("impl ").unwrap();
    let texts: Vec<&str> = variants.split("#[error(").skip(1).filter_map(|rest| rest.split('"').nth(1)).collect();
    assert!(texts.len() > 10, "{texts:?}");
    for text in texts.into_iter().filter(|text| !text.starts_with("cannot {") && !text.starts_with("cannot open")) {
        assert!(parts.iter().any(|part| text.contains(part)), "docs/runbook.md does not have: {text}");
    }
}

fn sources() -> String {
    let sources: Vec<String> = files(&root().join("src"), "rs").into_iter().map(|path| Page::read(path).text).collect();
    literals(&sources.join("\n"))
}

/// Sources with each text on one line: literals that go over several lines, and escapes, as they are printed.
fn literals(source: &str) -> String {
    source.replace("\\\n", " ").replace("\\\"", "'").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The texts of the program that a page quotes.
fn quotes(page: &Page) -> Vec<String> {
    let mut quotes: Vec<String> = Vec::new();
    let mut is_list = false;
    for (_, line) in page.prose() {
        is_list = !line.is_empty() && (is_list || line.contains("Other texts") || line.starts_with("Related: "));
        if line.starts_with("### ") || is_list {
            quotes.extend(line.split('`').skip(1).step_by(2).map(|quoted| quoted.replace('"', "'")));
        }
    }
    quotes
}

/// The words between the placeholders of a quoted text.
fn fixed_parts(quoted: &str) -> Vec<String> {
    let words: Vec<&str> = quoted.split_whitespace().collect();
    let parts = words.split(|word| is_placeholder(word)).map(|words| words.join(" "));
    parts.map(|part| part.trim_matches(',').to_owned()).filter(|part| !part.is_empty()).collect()
}

fn is_placeholder(word: &str) -> bool {
    let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
    bare == "N" || bare.len() > 1 && bare.chars().all(|c| c.is_uppercase() || c == '_') || bare.is_empty()
}

#[test]
fn the_handler_of_the_guide_is_the_example_that_is_tested() {
    let example = Page::read(root().join("examples/totals.rs")).text;
    // Its head is for readers of the file.
    let code = example.lines().skip_while(|line| line.starts_with("//!") || line.is_empty());
    let checked: String = code.map(|line| line.to_owned() + "\n").collect();
    let guide = Page::read(root().join("docs/handlers.md"));
    let (before, rest) = guide.text.split_once("```rust\n").unwrap();
    let (shown, after) = rest.split_once("```").unwrap();
    if updates() && shown != checked {
        std::fs::write(&guide.path, format!("{before}```rust\n{checked}```{after}")).unwrap();
        return;
    }
    assert_eq!(shown, checked, "{UPDATE}");
}

/// docs/handlers.md promises that triggers on `orders` outlast an upgrade.
#[test]
fn no_migration_rebuilds_the_table_of_orders() {
    for path in files(&root().join("migrations/sqlite"), "sql") {
        let sql = Page::read(path).text.to_lowercase();
        assert!(!sql.contains("drop table orders") && !sql.contains("rename to orders"), "{sql}");
    }
}

#[test]
fn the_readme_shows_the_steps_of_the_demo() {
    let demo = Page::read(root().join("tests/tools/demo.sh")).text;
    let readme = pages().swap_remove(0).text;
    let steps: Vec<&str> = readme.lines().filter_map(|line| line.strip_prefix("== ")).collect();
    assert!(steps.len() > 4, "{steps:?}");
    for step in steps {
        assert!(demo.contains(&format!("step \"{step}\"")), "{step}");
    }
    let sources = sources();
    for line in readme.lines().filter_map(|line| line.strip_prefix("INFO ")) {
        let text: Vec<&str> = line.split(' ').take_while(|word| !word.contains('=')).collect();
        assert!(sources.contains(&format!("\"{}\"", text.join(" "))), "no log line is {line}");
    }
}

#[tokio::test]
async fn the_reference_pages_are_what_the_binary_prints() {
    let spec = DaemonSpec::new("nats://127.0.0.1:1");
    for name in PRINTED {
        let printed = spec.run_ok(&["reference", name]).await.stdout;
        let path = root().join(format!("docs/reference/{name}.md"));
        if updates() {
            std::fs::write(&path, &printed).unwrap();
        }
        let page = Page::read(path);
        assert!(
            page.text == printed,
            "{} is not what `order-processor reference {name}` prints; {UPDATE}",
            page.name()
        );
    }
}
