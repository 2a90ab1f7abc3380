//! The live view of `status --watch`. Draws what was learnt, and keeps what changed while it looked; decides nothing.

use std::collections::VecDeque;
use std::io::{self, Stdout};
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;
use indicatif::HumanCount;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::layout::{Constraint, Layout};
use ratatui::prelude::CrosstermBackend;
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Wrap};
use ratatui::{Frame, Terminal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook_tokio::Signals;
use tokio::sync::mpsc;

use super::{Observer, StatusReport};
use crate::model::text::printable;
use crate::telemetry::status as daemon;

/// Events kept; what does not fit on the screen is not shown.
const EVENTS_MAX: usize = 200;
/// The rate is that of so many seconds.
const RATE_WINDOW: Duration = Duration::from_secs(5);
const WIDTH_MIN: u16 = 50;
const HEIGHT_MIN: u16 = 14;

/// Shows the status until `q`, Ctrl-C or a signal.
///
/// # Errors
/// When the terminal does not work, or no longer works.
pub async fn run(mut observer: Observer<'_>, interval: Duration) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let mut screen = Screen::enter()?;
    let mut keys = keys();
    let mut watch = Watch::default();
    let mut status: Option<StatusReport> = None;
    loop {
        screen.terminal.draw(|frame| draw(frame, status.as_ref(), &watch))?;
        let pause = if status.is_some() { interval } else { Duration::ZERO };
        // A look may wait for a server that does not answer; keys and resizes do not.
        let mut look = std::pin::pin!(async {
            tokio::time::sleep(pause).await;
            observer.learn().await
        });
        let learnt = loop {
            tokio::select! {
                learnt = &mut look => break learnt,
                _ = signals.next() => return Ok(()),
                event = keys.recv() => match event {
                    Some(Event::Key(key)) if key.kind == KeyEventKind::Press => match key.code {
                        KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                        _ => {}
                    },
                    Some(Event::Resize(..)) => {
                        screen.terminal.draw(|frame| draw(frame, status.as_ref(), &watch))?;
                    }
                    Some(_) => {}
                    // The terminal is gone.
                    None => return Ok(()),
                },
            }
        };
        watch.observe(&learnt, Instant::now(), SystemTime::now());
        status = Some(learnt);
    }
}

/// Keys and resizes, from a thread that ends with the process: a read of the terminal cannot be given up.
fn keys() -> mpsc::Receiver<Event> {
    let (sender, keys) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                break;
            }
        }
    });
    keys
}

/// The terminal while it is ours. It is given back as it was when this goes, also in a panic.
struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    fn enter() -> io::Result<Self> {
        let say = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // First, or what it says would vanish with the other screen.
            leave();
            say(panic);
        }));
        enable_raw_mode()?;
        let terminal = execute!(io::stdout(), EnterAlternateScreen, Hide)
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match terminal {
            Ok(terminal) => Ok(Self { terminal }),
            Err(error) => {
                leave();
                Err(error)
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

/// A terminal that is gone needs nothing, so failures do not matter.
fn leave() {
    drop(disable_raw_mode());
    drop(execute!(io::stdout(), LeaveAlternateScreen, Show));
}

/// What only shows in the course of time.
#[derive(Default)]
struct Watch {
    /// The latest first.
    events: VecDeque<String>,
    /// The ack floor at the last looks.
    floors: VecDeque<(Instant, u64)>,
    health: Option<String>,
    /// Ack floor and pending messages at the last look.
    progress: Option<(u64, u64)>,
    problems: Vec<String>,
    dead_letters: Option<u64>,
}

impl Watch {
    fn observe(&mut self, status: &StatusReport, now: Instant, at: SystemTime) {
        let mut happened = Vec::new();
        let health = health(status);
        if self.health.as_ref() != Some(&health) {
            let resumed = match (&self.health, self.progress, &status.daemon) {
                (Some(_), Some((floor, pending)), Some(daemon)) if daemon.ready => {
                    format!("; resumed after {floor}, {pending} waiting")
                }
                _ => String::new(),
            };
            happened.push(format!("daemon {health}{resumed}"));
        }
        // As it was before the daemon took up its work.
        if let (Some(floor), Some(pending)) = (status.floor(), status.num_pending) {
            self.progress = Some((floor, pending));
        }
        for problem in status.problems.iter().filter(|problem| !self.problems.contains(problem)) {
            happened.push(problem.clone());
        }
        for problem in self.problems.iter().filter(|problem| !status.problems.contains(problem)) {
            happened.push(format!("over: {problem}"));
        }
        if let (Some(before), Some(dead)) = (self.dead_letters, status.dead_letters)
            && before != dead
        {
            happened.push(format!("dead letters: {before} -> {dead}"));
        }
        let floor = status.ack_floor.map(|floor| floor.consumer_seq);
        if let (Some(floor), Some((_, before))) = (floor, self.floors.back().copied())
            && floor < before
        {
            happened.push(format!("the consumer was reset: ack floor {before} -> {floor} (consumer sequence)"));
            self.floors.clear();
        }
        if let Some(floor) = floor {
            self.floors.push_back((now, floor));
            while self.floors.len() > 2 && now.duration_since(self.floors[0].0) > RATE_WINDOW {
                self.floors.pop_front();
            }
        }
        (self.health, self.problems) = (Some(health), status.problems.clone());
        self.dead_letters = status.dead_letters.or(self.dead_letters);
        let time = humantime::format_rfc3339_seconds(at).to_string();
        let time = time.get(11..19).unwrap_or_default();
        for event in happened {
            self.events.push_front(format!("{time}  {}", printable(&event)));
        }
        self.events.truncate(EVENTS_MAX);
    }

    /// Messages acknowledged in a second.
    fn rate(&self) -> Option<f64> {
        let (first, last) = (self.floors.front()?, self.floors.back()?);
        let seconds = last.0.duration_since(first.0).as_secs_f64();
        (seconds > 0.0).then(|| last.1.saturating_sub(first.1) as f64 / seconds)
    }
}

fn health(status: &StatusReport) -> String {
    match (&status.daemon, &status.pause) {
        (None, None) => "not running; the values come from server and database".to_owned(),
        (None, Some(pause)) => format!("not running, and paused {pause}"),
        (Some(_), Some(pause)) => format!("paused {pause}"),
        (Some(daemon), None) => daemon.health(),
    }
}

fn draw(frame: &mut Frame<'_>, status: Option<&StatusReport>, watch: &Watch) {
    let area = frame.area();
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        let text = format!("{}x{} is too small, {WIDTH_MIN}x{HEIGHT_MIN} is needed; q quits", area.width, area.height);
        return frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    }
    let Some(status) = status else {
        return frame.render_widget(Paragraph::new("looking ..."), area);
    };
    let (color, text) = (health_color(status), printable(&health(status)).into_owned());
    let health = Line::from(vec![Span::from("daemon        "), Span::from(text).fg(color).bold()]);
    let problems = status
        .problems
        .iter()
        .map(|problem| Line::from(format!("problem       {}", printable(problem))).fg(Color::Red));
    let said: Vec<Line<'_>> = std::iter::once(health).chain(problems).collect();
    // Broken between words, a line may need a row more than its length says.
    let rows_said = said.iter().map(|line| line.width() / usize::from(area.width - 15) + 1).sum::<usize>();
    let free_height = area.height - (HEIGHT_MIN - 2);
    let [title, health_area, gauge, figures, events, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(u16::try_from(rows_said).unwrap_or(free_height).clamp(1, free_height)),
        Constraint::Length(1),
        Constraint::Length(7),
        Constraint::Min(2),
        Constraint::Length(1),
    ])
    .areas(area);
    let name = format!(" order-processor: {} on {} ", status.consumer, status.stream.name);
    frame.render_widget(Line::from(name).bold().reversed(), title);
    frame.render_widget(Paragraph::new(said).wrap(Wrap { trim: false }), health_area);
    frame.render_widget(progress(status), gauge);
    frame.render_widget(Paragraph::new(rows(status, watch)), figures);
    let events_text: Vec<Line<'_>> = watch.events.iter().map(|event| Line::from(event.as_str())).collect();
    frame.render_widget(
        Paragraph::new(events_text)
            .wrap(Wrap { trim: false })
            .block(Block::bordered().title(" events (UTC), latest first ")),
        events,
    );
    frame.render_widget(Line::from("q quits").dim(), foot);
}

fn health_color(status: &StatusReport) -> Color {
    match (&status.daemon, &status.pause) {
        (Some(daemon), None) if daemon.ready => Color::Green,
        (Some(daemon::Status { draining: true, .. }), None) | (_, Some(_)) => Color::Yellow,
        (Some(_), None) | (None, None) => Color::Red,
    }
}

/// How much of the stream the ack floor has passed.
fn progress(status: &StatusReport) -> Gauge<'static> {
    let gauge = Gauge::default().gauge_style(Style::new().fg(Color::Cyan).bg(Color::DarkGray));
    let (Some(floor), Some(first), Some(last)) = (status.floor(), status.stream.first_seq, status.stream.last_seq)
    else {
        return gauge.label("ack floor not known");
    };
    // Only what the stream still has is to be done.
    let (done, all) = ((floor + 1).saturating_sub(first), (last + 1).saturating_sub(first));
    let ratio = if all == 0 { 1.0 } else { (done as f64 / all as f64).clamp(0.0, 1.0) };
    gauge.ratio(ratio).label(format!(
        "ack floor {} of {}, {:.0} %",
        HumanCount(floor),
        HumanCount(last),
        (ratio * 100.0).floor()
    ))
}

fn rows(status: &StatusReport, watch: &Watch) -> Vec<Line<'static>> {
    let count = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| HumanCount(value).to_string());
    let size = |value: Option<usize>| count(value.and_then(|value| u64::try_from(value).ok()));
    let row = |name: &str, value: String| Line::from(format!("{name:<13} {value}"));
    let commit = match &status.daemon {
        Some(daemon) if daemon.last_commit_at.is_some() => format!(
            "{} messages in {:.1} ms; {} since its start, {} held",
            HumanCount(daemon.last_batch_messages),
            daemon.last_batch_seconds.as_secs_f64() * 1e3,
            HumanCount(daemon.committed_messages),
            HumanCount(daemon.held as u64),
        ),
        Some(_) => "none since its start".to_owned(),
        None => "?".to_owned(),
    };
    let mut letters = row("dead letters", count(status.dead_letters));
    if status.dead_letters.is_some_and(|letters| letters > 0) {
        letters = letters.fg(Color::Red);
    }
    let pending = format!(
        "{} to deliver, {} delivered and not acknowledged",
        count(status.num_pending),
        size(status.num_ack_pending)
    );
    let rate = status
        .ack_floor
        .and(watch.rate())
        .map_or_else(|| "?".to_owned(), |rate| HumanCount(rate.round() as u64).to_string());
    vec![
        row("pending", pending),
        row("redelivered", format!("{} not acknowledged yet", size(status.num_redelivered))),
        row("rate", format!("{rate} acknowledged a second")),
        row("last commit", commit),
        row("processed", format!("{} ids", count(status.processed_ids))),
        letters,
    ]
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use ratatui::backend::TestBackend;

    use super::*;
    use crate::ops::status::{Sequences, StreamStatus};
    use crate::telemetry::status::{Component, Problem};

    fn status(floor: u64) -> StatusReport {
        let sequences = Sequences { stream_seq: floor, consumer_seq: floor };
        StatusReport {
            warnings: Vec::new(),
            consumer: "order-processor".into(),
            ack_floor: Some(sequences),
            delivered: Some(sequences),
            num_pending: Some(1_234_567),
            num_ack_pending: Some(10),
            num_redelivered: Some(3),
            num_waiting: Some(1),
            paused: Some(false),
            stream: StreamStatus {
                name: "ORDERS".into(),
                first_seq: Some(1),
                last_seq: Some(2_000_000),
                messages: Some(2_000_000),
                bytes: Some(1),
            },
            processed_ids: Some(floor),
            dead_letters: Some(2),
            pause: None,
            daemon: Some(daemon::Status { ready: true, live: true, ..daemon::Status::default() }),
            problems: Vec::new(),
        }
    }

    fn drawn(width: u16, height: u16, status: Option<&StatusReport>, watch: &Watch) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, status, watch)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn every_size_is_drawn_and_from_80_by_24_on_everything_is_there() {
        let mut watch = Watch::default();
        let not_running = StatusReport { daemon: None, problems: vec!["no server".into()], ..status(1_000_000) };
        watch.observe(&not_running, Instant::now(), UNIX_EPOCH);
        for width in [1, 2, 10, 49, 50, 51, 66, 79, 80, 81, 200] {
            for height in [1, 2, 7, 13, 14, 15, 16, 20, 24, 50] {
                drawn(width, height, Some(&not_running), &watch);
                drawn(width, height, None, &watch);
            }
        }
        assert!(drawn(49, 24, Some(&not_running), &watch).contains("49x24 is too small"));
        for (width, height) in [(80, 24), (200, 50)] {
            let screen = drawn(width, height, Some(&not_running), &watch);
            for words in
                ["not running", "problem       no server", "ack floor 1,000,000 of 2,000,000", "1,234,567 to deliver"]
            {
                assert!(screen.contains(words), "{words} in {screen}");
            }
            assert!(screen.contains("00:00:00  no server") && screen.contains("dead letters  2"), "{screen}");
        }
    }

    #[test]
    fn a_long_event_is_wrapped_and_drives_no_terminal() {
        let mut watch = Watch::default();
        let problem =
            "no consumer \u{1b}[2J\u{202e} is bound because the server does not answer a request for it in time";
        let looking = StatusReport { problems: vec![problem.into()], ..status(1) };
        watch.observe(&looking, Instant::now(), UNIX_EPOCH);
        let screen = drawn(60, 30, Some(&looking), &watch);
        let events = screen.split("events (UTC)").nth(1).unwrap();
        assert!(events.contains("in time") && events.contains("\\u{1b}[2J\\u{202e}"), "{screen}");
        assert!(!screen.contains(['\u{1b}', '\u{202e}']), "{screen:?}");
    }

    #[test]
    fn what_is_not_known_is_drawn_as_such() {
        let mut unknown = StatusReport { ack_floor: None, num_pending: None, processed_ids: None, ..status(1) };
        unknown.stream.last_seq = None;
        let screen = drawn(80, 24, Some(&unknown), &Watch::default());
        assert!(screen.contains("ack floor not known") && screen.contains("? to deliver"), "{screen}");
    }

    #[test]
    fn a_restart_of_the_daemon_shows_as_events_and_the_rate_goes_on() {
        let mut watch = Watch::default();
        let start = Instant::now();
        let second = |n: u64| (start + Duration::from_secs(n), UNIX_EPOCH + Duration::from_secs(n));
        let down = StatusReport { daemon: None, ..status(3000) };
        let problems = vec![Problem::new(Component::Nats, "not connected yet")];
        let starting = daemon::Status { live: true, problems, ..daemon::Status::default() };
        let starting = StatusReport { daemon: Some(starting), ..status(3000) };
        for (n, seen) in (0..).zip([status(1000), status(3000), down, starting, status(4000)]) {
            let (now, at) = second(n);
            watch.observe(&seen, now, at);
        }
        let events: Vec<_> = watch.events.iter().rev().map(String::as_str).collect();
        assert_eq!(
            events,
            [
                "00:00:00  daemon ready",
                "00:00:02  daemon not running; the values come from server and database",
                "00:00:03  daemon not ready: nats: not connected yet",
                "00:00:04  daemon ready; resumed after 3000, 1234567 waiting",
            ]
        );
        assert_eq!(watch.rate(), Some(750.0));
        watch.observe(&status(5), second(5).0, second(5).1);
        assert_eq!(watch.events[0], "00:00:05  the consumer was reset: ack floor 4000 -> 5 (consumer sequence)");
        assert_eq!(watch.rate(), None);
    }
}
