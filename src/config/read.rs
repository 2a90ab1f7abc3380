//! From merged values to checked settings, with every problem on the way.

use std::time::Duration;

use ::config::{Value, ValueKind};

use super::parse::{
    byte_size, database, duration, id_scope, jetstream_name, json_pointer, log_level, path, redact, servers,
    socket_address, subject, text, whole_number, within, yes_or_no,
};
use super::{
    AuditSettings, Auth, Batch, Config, ConsumerNames, DEFAULT_API_PREFIX, HandlerSettings, Http, InboxSettings, Known,
    Log, LogFormat, Nats, OnConflict, OnMissingId, Retention, Retry, SETTINGS, Setting, Shutdown, Tls, how_to_close,
};

/// All sections are read before the first `?`, so that all problems are found and not only the first.
pub fn read_config(reader: &mut SettingsReader) -> Result<Config, Refused> {
    let nats = read_nats(reader);
    let consumer = read_consumer(reader);
    let batch = read_batch(reader);
    let retry = read_retry(reader);
    let inbox = read_inbox(reader);
    let database = reader.required("database.url", database);
    let handler_file = reader.optional("handler.file", path);
    let every = read_audit_every(reader);
    let listen = reader.required("http.listen", socket_address);
    let timeout = reader.bounded("shutdown.timeout", duration);
    let log = read_log(reader);
    Ok(Config {
        nats: nats?,
        consumer: consumer?,
        batch: batch?,
        retry: retry?,
        inbox: inbox?,
        database: database?,
        handler: HandlerSettings { file: handler_file? },
        audit: AuditSettings { every: every? },
        http: Http { listen: listen? },
        shutdown: Shutdown { timeout: timeout? },
        log: log?,
    })
}

fn read_nats(reader: &mut SettingsReader) -> Result<Nats, Refused> {
    let url = reader.required("nats.url", servers);
    let user_in_url = url.as_ref().is_ok_and(|url| url.contains('@'));
    let auth = read_auth(reader, user_in_url);
    if user_in_url && auth.is_ok() {
        reader.keep_to_ourselves("nats.url")?;
    }
    let api = read_api(reader);
    let tls = read_tls(reader);
    let (domain, api_prefix) = api?;
    Ok(Nats { url: url?, auth: auth?, domain, api_prefix, tls: tls? })
}

/// The domain, and the prefix of all requests.
fn read_api(reader: &mut SettingsReader) -> Result<(Option<String>, String), Refused> {
    let domain = reader.optional("nats.domain", jetstream_name);
    let prefix = reader.optional("nats.api_prefix", subject);
    match (domain?, prefix?) {
        (Some(_), Some(_)) => reader.refuse("nats.api_prefix", "is set together with nats.domain; set one of them"),
        (Some(domain), None) => {
            let prefix = format!("$JS.{domain}.API");
            Ok((Some(domain), prefix))
        }
        (None, Some(prefix)) => Ok((None, prefix)),
        (None, None) => Ok((None, DEFAULT_API_PREFIX.to_owned())),
    }
}

fn read_auth(reader: &mut SettingsReader, user_in_url: bool) -> Result<Auth, Refused> {
    let credentials_file = reader.optional("nats.credentials_file", path);
    let nkey_file = reader.optional("nats.nkey_file", path);
    let user = reader.optional("nats.user", |value| text(value).map(str::to_owned));
    let password_file = reader.optional("nats.password_file", path);
    let token_file = reader.optional("nats.token_file", path);
    let found = (credentials_file?, nkey_file?, token_file?, user?, password_file?);
    let auth = match found {
        (None, None, None, None, None) => return Ok(Auth::None),
        (Some(credentials_file), None, None, None, None) => Auth::Credentials { credentials_file },
        (None, Some(nkey_file), None, None, None) => Auth::Nkey { nkey_file },
        (None, None, Some(token_file), None, None) => Auth::Token { token_file },
        (None, None, None, Some(user), Some(password_file)) => Auth::UserPassword { user, password_file },
        (None, None, None, Some(_), None) => {
            return reader.refuse("nats.user", "is set without nats.password_file");
        }
        (None, None, None, None, Some(_)) => {
            return reader.refuse("nats.password_file", "is set without nats.user");
        }
        _ => return reader.more_than_one_way_in(user_in_url),
    };
    if user_in_url { reader.more_than_one_way_in(user_in_url) } else { Ok(auth) }
}

fn read_tls(reader: &mut SettingsReader) -> Result<Tls, Refused> {
    let ca_file = reader.optional("nats.tls.ca_file", path);
    let cert_file = reader.optional("nats.tls.cert_file", path);
    let key_file = reader.optional("nats.tls.key_file", path);
    let handshake_first = reader.required("nats.tls.handshake_first", yes_or_no);
    let tls = Tls { ca_file: ca_file?, cert_file: cert_file?, key_file: key_file?, handshake_first: handshake_first? };
    match (&tls.cert_file, &tls.key_file) {
        (Some(_), None) => reader.refuse("nats.tls.cert_file", "is set without nats.tls.key_file"),
        (None, Some(_)) => reader.refuse("nats.tls.key_file", "is set without nats.tls.cert_file"),
        (Some(_), Some(_)) | (None, None) => Ok(tls),
    }
}

fn read_consumer(reader: &mut SettingsReader) -> Result<ConsumerNames, Refused> {
    let stream = reader.required("consumer.stream", jetstream_name);
    let name = reader.required("consumer.name", jetstream_name);
    Ok(ConsumerNames { stream: stream?, name: name? })
}

fn read_batch(reader: &mut SettingsReader) -> Result<Batch, Refused> {
    let max_messages = reader.bounded("batch.max_messages", whole_number);
    let max_bytes = reader.bounded("batch.max_bytes", byte_size);
    // Both fit 32 bits, so neither cast can lose anything.
    Ok(Batch { max_messages: max_messages? as usize, max_bytes: max_bytes? as usize })
}

fn read_retry(reader: &mut SettingsReader) -> Result<Retry, Refused> {
    let max_attempts = reader.bounded("retry.max_attempts", whole_number);
    let min_delay = reader.bounded("retry.min_delay", duration);
    let max_delay = reader.bounded("retry.max_delay", duration);
    if let (Ok(min_delay), Ok(max_delay)) = (&min_delay, &max_delay)
        && max_delay < min_delay
    {
        let what = format!("is less than retry.min_delay ({})", reader.source("retry.min_delay"));
        return reader.refuse("retry.max_delay", &what);
    }
    Ok(Retry { max_attempts: max_attempts?, min_delay: min_delay?, max_delay: max_delay? })
}

fn read_inbox(reader: &mut SettingsReader) -> Result<InboxSettings, Refused> {
    let on_conflict = reader.required("inbox.on_conflict", |value| match text(value)? {
        "dead-letter" => Ok(OnConflict::DeadLetter),
        "duplicate" => Ok(OnConflict::Duplicate),
        _ => Err("is neither".to_owned()),
    });
    let id_pointer = reader.optional("inbox.id_pointer", json_pointer);
    let id_scope = reader.required("inbox.id_scope", id_scope);
    let on_missing_id = reader.required("inbox.on_missing_id", |value| match text(value)? {
        "place" => Ok(OnMissingId::Place),
        "dead-letter" => Ok(OnMissingId::DeadLetter),
        _ => Err("is neither".to_owned()),
    });
    let retention = reader.bounded_or("inbox.retention", "auto", duration);
    let retention = retention.map(|fixed| fixed.map_or(Retention::Auto, Retention::For));
    Ok(InboxSettings {
        on_conflict: on_conflict?,
        id_pointer: id_pointer?,
        id_scope: id_scope?,
        on_missing_id: on_missing_id?,
        retention: retention?,
    })
}

fn read_audit_every(reader: &mut SettingsReader) -> Result<Option<Duration>, Refused> {
    reader.bounded_or("audit.every", "off", duration)
}

fn read_log(reader: &mut SettingsReader) -> Result<Log, Refused> {
    let level = reader.required("log.level", log_level);
    let format = reader.required("log.format", |value| match text(value)? {
        "auto" => Ok(LogFormat::Auto),
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("is not one of these".to_owned()),
    });
    Ok(Log { level: level?, format: format? })
}

/// Takes the merged values one by one and gathers what is wrong with them.
pub struct SettingsReader {
    pub merged: Value,
    pub problems: Vec<String>,
}

/// A value that is not there because of a problem that is already in [`SettingsReader::problems`].
pub struct Refused;

impl SettingsReader {
    fn required<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Result<T, Refused> {
        match self.optional(key, parse)? {
            Some(value) => Ok(value),
            None => self.refuse(key, "is not set"),
        }
    }

    /// A value within the bounds of `key` in [`SETTINGS`].
    fn bounded<T: PartialOrd>(
        &mut self,
        key: &'static str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<T, Refused> {
        let bounds = Known::of(key).bounds.expect("only such keys are read with bounds");
        self.required(key, |value| within(value, bounds, parse))
    }

    /// The same; `None` if the value is `word`.
    fn bounded_or<T: PartialOrd>(
        &mut self,
        key: &'static str,
        word: &str,
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<Option<T>, Refused> {
        let bounds = Known::of(key).bounds.expect("only such keys are read with bounds");
        self.required(key, |value| match &value.kind {
            ValueKind::String(text) if text == word => Ok(None),
            _ => within(value, bounds, parse).map(Some),
        })
    }

    /// `parse` says what is wrong, to be read after the value; what is allowed comes from [`SETTINGS`].
    fn optional<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Result<Option<T>, Refused> {
        let Some(value) = lookup(&self.merged, key) else { return Ok(None) };
        match parse(value) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(what) => self.refuse(key, &what),
        }
    }

    /// Reports the value of `key`, and gives the error to return.
    fn refuse<T>(&mut self, key: &'static str, what: &str) -> Result<T, Refused> {
        let allowed = Known::of(key).allowed();
        let value = lookup(&self.merged, key).map_or_else(String::new, |value| shown(key, value));
        let source = self.source(key);
        self.problems.push(format!("{key} ({source}): {value} {what}; allowed: {allowed}"));
        Err(Refused)
    }

    fn more_than_one_way_in<T>(&mut self, user_in_url: bool) -> Result<T, Refused> {
        const WAYS: [&str; 5] =
            ["nats.credentials_file", "nats.nkey_file", "nats.user", "nats.password_file", "nats.token_file"];
        let set = WAYS.into_iter().filter(|key| lookup(&self.merged, key).is_some());
        let set: Vec<_> = user_in_url.then_some("nats.url").into_iter().chain(set).collect();
        let set: Vec<_> = set.into_iter().map(|key| format!("{key} ({})", self.source(key))).collect();
        self.problems.push(format!(
            "{}: more than one way to log in; allowed: a user in nats.url, or one of nats.credentials_file, \
             nats.nkey_file, nats.token_file, nats.user with nats.password_file",
            set.join(", ")
        ));
        Err(Refused)
    }

    /// A secret in a file that every user of the machine can read is not a secret.
    fn keep_to_ourselves(&mut self, key: &'static str) -> Result<(), Refused> {
        let source = self.source(key);
        let Some(file) = source.strip_prefix("file ") else { return Ok(()) };
        if let Some(how) = std::fs::metadata(file).ok().and_then(|metadata| how_to_close(file.as_ref(), &metadata)) {
            let what = format!("holds a secret, and every user may read the file; close it with {how}");
            self.problems.push(format!("{key} ({source}): {what}"));
            return Err(Refused);
        }
        Ok(())
    }

    fn source(&self, key: &str) -> String {
        lookup(&self.merged, key).and_then(Value::origin).unwrap_or("default").to_owned()
    }

    pub fn settings(&self) -> Vec<Setting> {
        let setting = |known: &Known| {
            let value = match lookup(&self.merged, known.key) {
                None => String::new(),
                Some(value) if known.key == "nats.url" => redact(&value.to_string()),
                Some(value) => value.to_string(),
            };
            Setting { key: known.key, value, source: self.source(known.key) }
        };
        SETTINGS.iter().map(setting).collect()
    }
}

fn lookup<'a>(merged: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(merged, |value, segment| match &value.kind {
        ValueKind::Table(table) => table.get(segment),
        _ => None,
    })
}

/// A refused value as a problem shows it, on one line. A URL that we could not make sense of may hold a password
/// anywhere, so it is shown only where it cannot.
fn shown(key: &str, value: &Value) -> String {
    match &value.kind {
        ValueKind::String(_) if key == "nats.url" => "(value not shown)".to_owned(),
        ValueKind::String(text) if key == "database.url" && text.contains(['@', '?']) => "(value not shown)".to_owned(),
        ValueKind::String(text) => format!("{text:?}"),
        ValueKind::Array(_) => "a list".to_owned(),
        _ => value.to_string(),
    }
}
