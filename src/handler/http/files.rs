//! The files that a route names: secrets, values of headers, certificates. They are checked at the start, and read again for each
//! connection, so that a replaced file is used within a minute.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::header::{HeaderName, HeaderValue};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::signature::Keys;
use crate::config::how_to_close;

/// Far above the size of any such file.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

#[derive(Clone, Debug, Default)]
pub(super) struct Paths {
    pub secret: Option<PathBuf>,
    pub headers: Vec<HeaderFile>,
    pub ca: Option<PathBuf>,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub is_tls: bool,
}

#[derive(Clone, Debug)]
pub(super) struct HeaderFile {
    pub name: HeaderName,
    pub path: PathBuf,
}

/// What the files have. Each connection has its own.
pub(super) struct Files {
    pub keys: Option<Keys>,
    /// Their values are marked as sensitive.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub tls: Option<Arc<ClientConfig>>,
}

/// Every problem, with the name of its setting and the path of its file.
pub(super) fn check(paths: &Paths) -> Vec<String> {
    let mut problems = Vec::new();
    let mut note = |path: Option<&PathBuf>, problem: FileProblem| {
        let FileProblem { setting, what, cure } = problem;
        let path = path.map_or_else(String::new, |path| format!("{} ", path.display()));
        problems.push(format!("{setting}: {path}{what}{cure}"));
    };
    if let Err(problem) = keys(paths) {
        note(paths.secret.as_ref(), problem);
    }
    for file in &paths.headers {
        if let Err(problem) = header(file) {
            note(Some(&file.path), problem);
        }
    }
    if let Err(problem) = tls(paths) {
        let path = match problem.setting.as_str() {
            "ca_file" => paths.ca.as_ref(),
            "cert_file" => paths.cert.as_ref(),
            _ => paths.key.as_ref(),
        };
        note(path, problem);
    }
    problems
}

/// Reads all files. For a thread that may block.
///
/// # Errors
/// The setting whose file cannot be used, and why; never a path, because the text goes into the log.
pub(super) fn read(paths: &Paths) -> Result<Files, String> {
    let shown = |FileProblem { setting, what, .. }| format!("the file of {setting} {what}");
    let headers: Result<Vec<_>, _> = paths.headers.iter().map(header).collect();
    Ok(Files { keys: keys(paths).map_err(shown)?, headers: headers.map_err(shown)?, tls: tls(paths).map_err(shown)? })
}

/// What is wrong with the file of a setting. The text does not name the path.
struct FileProblem {
    setting: String,
    what: String,
    /// What the operator can do, with the path.
    cure: String,
}

impl FileProblem {
    fn new(setting: &str, what: impl Into<String>) -> Self {
        Self { setting: setting.to_owned(), what: what.into(), cure: String::new() }
    }
}

fn keys(paths: &Paths) -> Result<Option<Keys>, FileProblem> {
    const SETTING: &str = "secret_file";
    let Some(path) = &paths.secret else { return Ok(None) };
    let text = secret(SETTING, path)?;
    Keys::parse(&text).map(Some).map_err(|what| FileProblem::new(SETTING, what))
}

fn header(HeaderFile { name, path }: &HeaderFile) -> Result<(HeaderName, HeaderValue), FileProblem> {
    let setting = format!("header_files.{name}");
    let text = secret(&setting, path)?;
    match HeaderValue::from_str(text.trim()) {
        Ok(value) if value.is_empty() => Err(FileProblem::new(&setting, "is empty")),
        Ok(mut value) => {
            value.set_sensitive(true);
            Ok((name.clone(), value))
        }
        Err(_) => Err(FileProblem::new(&setting, "has characters that a header cannot have")),
    }
}

fn tls(paths: &Paths) -> Result<Option<Arc<ClientConfig>>, FileProblem> {
    if !paths.is_tls {
        return Ok(None);
    }
    let mut roots = RootCertStore::empty();
    match &paths.ca {
        Some(path) => {
            for certificate in certificates("ca_file", path)? {
                let added = roots.add(certificate);
                added.map_err(|error| FileProblem::new("ca_file", format!("has an unusable certificate: {error}")))?;
            }
        }
        // A certificate of the system that rustls cannot use does not matter: others remain.
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| FileProblem::new("ca_file", error.to_string()))?
        .with_root_certificates(roots);
    let (Some(cert), Some(key)) = (&paths.cert, &paths.key) else {
        return Ok(Some(Arc::new(builder.with_no_client_auth())));
    };
    let key = PrivateKeyDer::from_pem_slice(secret("key_file", key)?.as_bytes())
        .map_err(|_| FileProblem::new("key_file", "does not have a private key (PEM, without a passphrase)"))?;
    let config = builder.with_client_auth_cert(certificates("cert_file", cert)?, key);
    config
        .map(|config| Some(Arc::new(config)))
        .map_err(|error| FileProblem::new("key_file", format!("does not match the certificate: {error}")))
}

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, FileProblem> {
    let text = text(setting, path)?;
    match CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>() {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) | Err(_) => Err(FileProblem::new(setting, "does not have certificates (PEM)")),
    }
}

/// The content of a file that only the daemon may read.
fn secret(setting: &str, path: &Path) -> Result<String, FileProblem> {
    let unreadable = |error: std::io::Error| FileProblem::new(setting, format!("cannot be read: {error}"));
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if let Some(how) = how_to_close(path, &metadata).filter(|_| metadata.is_file()) {
        let mode = metadata.permissions().mode() & 0o7777;
        let what = format!("is open to every user (mode {mode:04o})");
        return Err(FileProblem { cure: format!("; close it with {how}"), ..FileProblem::new(setting, what) });
    }
    text(setting, path)
}

fn text(setting: &str, path: &Path) -> Result<String, FileProblem> {
    let unreadable = |error: std::io::Error| FileProblem::new(setting, format!("cannot be read: {error}"));
    // Before it is opened, because opening a pipe would wait for its other end.
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(FileProblem::new(setting, "is not a file"));
    }
    let mut text = String::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(FileProblem::new(setting, "is larger than 1 MiB, which is too large for its purpose"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_every_user_may_read_is_refused_and_a_connection_names_no_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shop.token");
        fs::write(&path, "Bearer abc\n").unwrap();
        let file = HeaderFile { name: HeaderName::from_static("authorization"), path: path.clone() };
        let paths = Paths { headers: vec![file], ..Paths::default() };
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let problems = check(&paths);
        assert!(problems.len() == 1 && problems[0].contains("mode 0644"), "{problems:?}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(check(&paths), Vec::<String>::new());
        let Ok(files) = read(&paths) else { panic!("it can be read") };
        assert_eq!(files.headers[0].1, "Bearer abc");
        assert!(files.headers[0].1.is_sensitive());
        fs::remove_file(&path).unwrap();
        let Err(problem) = read(&paths) else { panic!("it is gone") };
        assert!(problem.contains("header_files.authorization") && !problem.contains("shop.token"), "{problem}");
    }
}
