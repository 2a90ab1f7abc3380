//! What must hold for any bytes that come from outside. The fuzz targets feed these with bytes of their own making, and a test of
//! the daemon with the seeds that were kept, so that they need no fuzzer to stay true.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use order_processor::config::{Config, Loaded};
use order_processor::jetstream::stored::read_answer;
use order_processor::jetstream::unreadable::why_unreadable;
use order_processor::model::delivery::{Arrival, Delivery, Position, Raw};
use order_processor::model::id::{IdScheme, MESSAGE_ID_HEADER, UniqueIn};
use order_processor::model::schemes::IdSchemes;

/// Lines of text: reply subject, subject, id pointer, then headers up to an empty line; the rest is the payload.
pub fn delivery(bytes: &[u8]) {
    let mut rest = bytes;
    let mut line = || {
        let end = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        let line = String::from_utf8_lossy(&rest[..end]).into_owned();
        rest = rest.get(end + 1..).unwrap_or_default();
        line
    };
    let (reply, subject, pointer) = (line(), line(), line());
    let headers = std::iter::from_fn(|| Some(line()).filter(|line| !line.is_empty()))
        .map(|line| {
            line.split_once(':').map_or((line.clone(), String::new()), |(name, value)| (name.into(), value.into()))
        })
        .collect();
    let position = Position::parse(&reply);
    if let Some(Position { delivered, stream_seq, consumer_seq, published_ns }) = position {
        let written = format!("$JS.ACK.s.c.{delivered}.{stream_seq}.{consumer_seq}.{published_ns}.0");
        assert_eq!(Position::parse(&written), position, "written anew: {written}");
    }
    let position =
        position.unwrap_or(Position { delivered: 1, stream_seq: 7, consumer_seq: 9, published_ns: 1_700_000_000 });
    let payload = rest.to_vec();
    let raw = Raw { subject: subject.into(), headers, payload: payload.clone().into(), position, unreadable: None };
    for pointer in [None, Some(pointer)] {
        let scheme = IdSchemes::from(IdScheme {
            stream: "ORDERS".into(),
            pointer: pointer.clone(),
            unique_in: UniqueIn::Subject,
        });
        let delivery = Delivery::new(raw.clone(), &scheme);
        assert_the_id_is_that_of_the_message(&delivery, &scheme);
        assert_the_pointer_is_followed(&delivery, pointer.as_deref(), &payload);
    }
}

/// The same at each delivery, and for what lies elsewhere in the stream only if the publisher says so.
fn assert_the_id_is_that_of_the_message(delivery: &Delivery, scheme: &IdSchemes) {
    let mut again = delivery.raw.clone();
    again.position.delivered = again.position.delivered.wrapping_add(1);
    again.position.consumer_seq = again.position.consumer_seq.wrapping_add(1);
    let again = Delivery::new(again, scheme);
    assert_eq!((&again.id, again.digest), (&delivery.id, delivery.digest), "delivered again");
    assert!(!delivery.id.is_empty());

    let mut other = delivery.raw.clone();
    other.position.stream_seq = other.position.stream_seq.wrapping_add(1);
    let other = Delivery::new(other, scheme);
    let by_position =
        delivery.id.ends_with(&format!("@{}:{}", delivery.raw.position.published_ns, delivery.raw.position.stream_seq));
    assert!(by_position || other.id == delivery.id, "the id depends on a position that it does not show");
    assert_eq!(other.digest, delivery.digest);
}

/// Where the library that knows JSON finds a value, so do we.
fn assert_the_pointer_is_followed(delivery: &Delivery, pointer: Option<&str>, payload: &[u8]) {
    let has_header = delivery.raw.headers.iter().any(|(name, value)| name == MESSAGE_ID_HEADER && !value.is_empty());
    let Some(pointer) = pointer.filter(|pointer| pointer.starts_with('/') && !has_header) else { return };
    // It refuses what we take, numbers beyond its range for one, so only its finds count.
    let Ok(json) = serde_json::from_slice::<serde_json::Value>(payload) else { return };
    let found = json.pointer(pointer);
    let of_value = delivery.id.strip_prefix(&format!("{} ", delivery.raw.subject));
    match found {
        Some(serde_json::Value::String(text)) if !text.is_empty() => assert_eq!(of_value, Some(text.as_str())),
        Some(serde_json::Value::Number(number)) => {
            let parsed = of_value.and_then(|text| serde_json::from_str::<serde_json::Number>(text).ok());
            assert_eq!(parsed.as_ref(), Some(number));
        }
        Some(_) | None => assert!(delivery.id.starts_with("ORDERS@"), "{:?} from nothing", delivery.id),
    }
    assert_eq!(delivery.defect, None, "JSON is decodable");
}

/// An answer of the server with a stored message; and, after a line with the subject, a header block as it is stored.
pub fn quarantine(bytes: &[u8]) {
    if let Ok(Some(stored)) = read_answer(bytes) {
        let (seq, published_ns, payload) = (stored.seq, stored.published_ns, stored.payload.clone());
        let Arrival { raw, reply } = stored.into_unreadable("ORDERS", "order-processor", "why".into());
        assert_eq!((raw.position.stream_seq, raw.position.published_ns), (seq, published_ns));
        assert_eq!(Position::parse(&reply.subject).map(|position| position.stream_seq), Some(seq));
        assert_eq!(raw.payload, payload);
        let scheme = IdScheme { stream: "ORDERS".into(), pointer: Some("/id".into()), unique_in: UniqueIn::Subject };
        assert!(Delivery::new(raw, &scheme.into()).defect.is_some(), "what is unreadable is never applied");
    }
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    let subject = String::from_utf8_lossy(&bytes[..end]);
    let block = bytes.get(end + 1..).unwrap_or_default();
    if let Some(why) = why_unreadable(&subject, block) {
        assert!(!why.contains(['\r', '\n']), "a log line has no line breaks: {why:?}");
    }
}

/// The text of a file, and after the line `# environment` one variable a line.
pub fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (file, variables) = text.split_once("# environment\n").unwrap_or((&text, ""));
    let variables = variables.lines().filter_map(|line| line.split_once('='));
    match load(file, variables.map(|(name, value)| (name.into(), value.into()))) {
        Ok(loaded) => assert_it_can_be_said_again(&loaded),
        Err(problems) => {
            assert!(!problems.is_empty());
            for line in problems {
                assert!(!line.contains(char::is_control), "a problem is one line: {line:?}");
                // `key (source): what`, or `source: what` where there is no key.
                assert!(line.contains(": ") && (line.contains("file") || line.contains("environment")), "{line}");
            }
        }
    }
}

fn load(file: &str, env: impl Iterator<Item = (OsString, OsString)>) -> Result<Loaded, Vec<String>> {
    let mut written = tempfile::NamedTempFile::new_in(folder()).expect("a temporary file");
    written.write_all(file.as_bytes()).expect("a temporary file");
    Config::load(Some(written.path()), env).map_err(|problems| problems.lines().to_vec())
}

/// In memory where there is such a place: a fuzzer writes thousands of files in a second.
fn folder() -> &'static Path {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory } else { Path::new("/tmp") }
}

/// What `config` prints means the same when it is written into the environment.
fn assert_it_can_be_said_again(loaded: &Loaded) {
    let variable = |key: &str| format!("ORDER_PROCESSOR__{}", key.replace('.', "__").to_ascii_uppercase());
    let printed = loaded.settings.iter().filter(|setting| !setting.value.is_empty());
    let printed = printed.map(|setting| {
        let is_url = setting.key == "nats.url";
        // A password is not printed.
        let value = if is_url { &loaded.config.nats.url } else { &setting.value };
        assert!(!is_url || setting.value == loaded.config.nats.redacted_url());
        (variable(setting.key).into(), value.into())
    });
    let again = load("", printed).expect("what was accepted is accepted again");
    assert_eq!(again.config, loaded.config);
}
