//! The files that the settings name for login and TLS: secrets and certificates. They are read again at each connect, so that a
//! replaced file is used from the next connect on. They are checked before, because the client does not name the file that it
//! cannot use.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use async_nats::rustls::pki_types::pem::PemObject;
use async_nats::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use async_nats::rustls::{ClientConfig, RootCertStore};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use nkeys::{KeyPair, KeyPairType};
use serde::Deserialize;

use crate::config::{Auth, Nats, Tls, how_to_close};

/// Far above the size of any such file. A bundle of all public authorities has a quarter of this.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// A file that cannot be used. The operator must correct it.
#[derive(Debug, thiserror::Error)]
#[error("{}, the value of {setting}, {what}", path.display())]
pub struct FileError {
    setting: &'static str,
    path: PathBuf,
    what: String,
}

/// Checks every file, as far as that is possible without the server.
///
/// # Errors
/// The first file that cannot be used.
pub async fn check(nats: &Nats) -> Result<(), FileError> {
    log_in(&nats.auth, b"").await?;
    check_tls(&nats.tls).await
}

/// The login for a connect. `nonce`: what the server wants to be signed.
///
/// # Errors
/// If the file cannot be used, or if every user may read it.
pub async fn log_in(auth: &Auth, nonce: &[u8]) -> Result<async_nats::Auth, FileError> {
    let mut answer = async_nats::Auth::new();
    match auth {
        Auth::None => {}
        Auth::UserPassword { user, password_file } => {
            answer.username = Some(user.clone());
            answer.password = Some(File { setting: "nats.password_file", path: password_file }.secret().await?);
        }
        Auth::Token { token_file } => {
            answer.token = Some(File { setting: "nats.token_file", path: token_file }.secret().await?);
        }
        Auth::Nkey { nkey_file } => {
            let file = File { setting: "nats.nkey_file", path: nkey_file };
            let seed = file.secret().await?;
            let key =
                user_key(seed.trim()).ok_or_else(|| file.unfit("does not have an NKey seed of a user (SU...)"))?;
            answer.nkey = Some(key.public_key());
            answer.signature = Some(sign(&key, nonce, file)?);
        }
        Auth::Credentials { credentials_file } => {
            let file = File { setting: "nats.credentials_file", path: credentials_file };
            let text = file.secret().await?;
            let (jwt, seed) = credentials(&text).ok_or_else(|| {
                file.unfit("does not have a user JWT and an NKey seed, each between its two lines of dashes")
            })?;
            let key =
                user_key(seed).ok_or_else(|| file.unfit("has a seed that is not an NKey seed of a user (SU...)"))?;
            answer.jwt = Some(jwt.to_owned());
            answer.signature = Some(sign(&key, nonce, file)?);
        }
    }
    Ok(answer)
}

/// When the JWT in a credentials file expired, if it has expired.
pub async fn expired_at(auth: &Auth) -> Option<SystemTime> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    let Auth::Credentials { credentials_file } = auth else { return None };
    let text = File { setting: "nats.credentials_file", path: credentials_file }.secret().await.ok()?;
    let claims = BASE64.decode(credentials(&text)?.0.split('.').nth(1)?).ok()?;
    let claims: Claims = serde_json::from_slice(&claims).ok()?;
    let expires_at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(claims.exp))?;
    (claims.exp > 0 && expires_at <= SystemTime::now()).then_some(expires_at)
}

/// Reads the PEM files as the client will.
async fn check_tls(tls: &Tls) -> Result<(), FileError> {
    if let Some(path) = &tls.ca_file {
        let file = File { setting: "nats.tls.ca_file", path };
        let mut roots = RootCertStore::empty();
        for certificate in file.certificates().await? {
            roots
                .add(certificate)
                .map_err(|error| file.unfit(&format!("has a certificate that is not of an authority: {error}")))?;
        }
    }
    let (Some(cert), Some(key)) = (&tls.cert_file, &tls.key_file) else { return Ok(()) };
    let chain = File { setting: "nats.tls.cert_file", path: cert }.certificates().await?;
    let file = File { setting: "nats.tls.key_file", path: key };
    let key = PrivateKeyDer::from_pem_slice(file.secret().await?.as_bytes())
        .map_err(|_| file.unfit("does not have a private key (PEM, without a passphrase)"))?;
    ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_client_auth_cert(chain, key)
        .map_err(|error| file.unfit(&format!("does not match the certificate in {}: {error}", cert.display())))?;
    Ok(())
}

#[derive(Clone, Copy)]
struct File<'a> {
    setting: &'static str,
    path: &'a Path,
}

impl File<'_> {
    /// The content of a file that only the daemon may read, without the line end that editors add.
    async fn secret(self) -> Result<String, FileError> {
        let metadata = self.metadata().await?;
        if let Some(how) = how_to_close(self.path, &metadata) {
            let mode = metadata.permissions().mode() & 0o7777;
            return Err(self.unfit(&format!("is open to every user (mode {mode:04o}); close it with {how}")));
        }
        let text = self.text().await?;
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(self.unfit("is empty")),
            text => Ok(text.to_owned()),
        }
    }

    async fn certificates(self) -> Result<Vec<CertificateDer<'static>>, FileError> {
        self.metadata().await?;
        let text = self.text().await?;
        match CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>() {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            Ok(_) | Err(_) => Err(self.unfit("does not have certificates (PEM)")),
        }
    }

    /// Checked before the file is opened, because opening a pipe would wait for its other end.
    async fn metadata(self) -> Result<std::fs::Metadata, FileError> {
        let metadata = tokio::fs::metadata(self.path).await.map_err(|error| self.unreadable(&error))?;
        match metadata {
            metadata if !metadata.is_file() => Err(self.unfit("is not a file")),
            metadata if metadata.len() > FILE_BYTES_MAX => {
                Err(self.unfit("is larger than 1 MiB, which is too large for its purpose"))
            }
            metadata => Ok(metadata),
        }
    }

    async fn text(self) -> Result<String, FileError> {
        tokio::fs::read_to_string(self.path).await.map_err(|error| self.unreadable(&error))
    }

    fn unreadable(self, error: &std::io::Error) -> FileError {
        self.unfit(&format!("cannot be read: {error}"))
    }

    fn unfit(self, what: &str) -> FileError {
        FileError { setting: self.setting, path: self.path.to_owned(), what: what.to_owned() }
    }
}

/// `None` for a text that is not the seed of a user.
fn user_key(seed: &str) -> Option<KeyPair> {
    let key = KeyPair::from_seed(seed).ok()?;
    matches!(key.key_pair_type(), KeyPairType::User).then_some(key)
}

fn sign(key: &KeyPair, nonce: &[u8], file: File<'_>) -> Result<Vec<u8>, FileError> {
    key.sign(nonce).map_err(|error| file.unfit(&format!("has a key that cannot sign: {error}")))
}

/// JWT and seed of a credentials file: the line after each dashed line with BEGIN.
fn credentials(text: &str) -> Option<(&str, &str)> {
    let is_dashed = |line: &str| line.starts_with("---") && line.ends_with("---");
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut next = || {
        lines.find(|line| is_dashed(line) && line.contains("BEGIN"))?;
        let content = lines.next()?;
        lines.next().is_some_and(is_dashed).then_some(content)
    };
    let (jwt, seed) = (next()?, next()?);
    (jwt.split('.').count() == 3).then_some((jwt, seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JWT: &str = "-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n";
    const SEED: &str = "-----BEGIN USER NKEY SEED-----\nSUAX\n------END USER NKEY SEED------\n";

    #[test]
    fn jwt_and_seed_are_found_whatever_stands_around_them() {
        for (before, between, after) in
            [("", "", ""), ("# mine\n", "\nkeep it secret\n", "\n***\n"), ("\r\n", "*** IMPORTANT\n", "")]
        {
            let text = format!("{before}{JWT}{between}{SEED}{after}");
            assert_eq!(credentials(&text), Some(("a.b.c", "SUAX")), "{text}");
            assert_eq!(credentials(text.replace('\n', "\r\n").trim_end()), Some(("a.b.c", "SUAX")), "{text}");
        }
    }

    #[test]
    fn half_a_credentials_file_is_none() {
        let halves = [
            String::new(),
            "SUAX".to_owned(),
            JWT.to_owned(),
            SEED.to_owned(),
            format!("{JWT}{}", &SEED[..SEED.len() / 2]),
            format!("{}{SEED}", JWT.replace("a.b.c", "a.b")),
            format!("{}{SEED}", JWT.replace("a.b.c\n", "")),
        ];
        for half in halves {
            assert_eq!(credentials(&half), None, "{half}");
        }
    }
}
