//! What opens doors, made for one test: certificates of an authority of its own, and NKeys and JWTs of an operator of its own.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use nkeys::KeyPair as Nkey;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// A file for its owner alone.
pub fn secret(path: PathBuf, text: &str) -> PathBuf {
    // Like an operator who replaces it: in one step, under the same name.
    let new = path.with_extension("new");
    std::fs::write(&new, text).expect("the file can be written");
    set_mode(&new, 0o600);
    std::fs::rename(&new, &path).expect("the file can be put in place");
    path
}

pub fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("it is our file");
}

pub fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode() & 0o7777
}

/// An authority for certificates. It writes them into its folder.
pub struct Authority {
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// PEM files.
pub struct Certificate {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names are wrong");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key can be made"));
        let authority = Self { folder: folder.join(name), issuer: issuer.expect("it can sign itself") };
        std::fs::create_dir(&authority.folder).expect("the folder is new");
        std::fs::write(authority.ca(), authority.issuer.pem()).expect("the file can be written");
        authority
    }

    pub fn ca(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    /// For a server on loopback, or a client. `until`: the year in whose beginning it ends.
    pub fn issue(&self, name: &str, until: i32) -> Certificate {
        self.issue_for(name, "127.0.0.1", until)
    }

    /// For a server with this host name or address.
    pub fn issue_for(&self, name: &str, host: &str, until: i32) -> Certificate {
        let mut params = CertificateParams::new([host.to_owned()]).expect("it is a host name or an address");
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().expect("a key can be made");
        let cert = params.signed_by(&key, &self.issuer).expect("the authority can sign");
        let at = |suffix: &str| self.folder.join(format!("{name}.{suffix}"));
        Certificate { cert: secret(at("pem"), &cert.pem()), key: secret(at("key"), &key.serialize_pem()) }
    }
}

/// The owner of a server in operator mode, with one account for everybody.
pub struct Operator {
    operator: Nkey,
    account: Nkey,
    system: Nkey,
}

impl Operator {
    pub fn new() -> Self {
        Self { operator: Nkey::new_operator(), account: Nkey::new_account(), system: Nkey::new_account() }
    }

    /// Lines for the server's configuration.
    pub fn config(&self) -> String {
        let none = serde_json::json!({"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1,
            "wildcards": true, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1});
        let operator = jwt(&self.operator, &self.operator, None, serde_json::json!({"type": "operator"}));
        let account = jwt(&self.operator, &self.account, None, serde_json::json!({"type": "account", "limits": none}));
        let system = jwt(
            &self.operator,
            &self.system,
            None,
            serde_json::json!({"type": "account", "limits": {"subs": -1,
            "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1, "wildcards": true}}),
        );
        let (account_key, system_key) = (self.account.public_key(), self.system.public_key());
        format!(
            "operator: {operator}\nsystem_account: {system_key}\nresolver: MEMORY\nresolver_preload: {{\n  \
             {account_key}: {account}\n  {system_key}: {system}\n}}\n"
        )
    }

    /// A credentials file of a new user. `valid_secs`: for how long from now on, if not for ever; less than 0 is over already.
    pub fn user(&self, valid_secs: Option<i64>) -> String {
        let user = Nkey::new_user();
        let jwt = jwt(
            &self.account,
            &user,
            valid_secs,
            serde_json::json!({"type": "user", "subs": -1, "data": -1, "payload": -1}),
        );
        let seed = user.seed().expect("a new key has a seed");
        format!(
            "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
    }
}

fn jwt(issuer: &Nkey, subject: &Nkey, valid_secs: Option<i64>, mut nats: serde_json::Value) -> String {
    nats["version"] = 2.into();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs();
    let mut claims = serde_json::json!({
        "jti": format!("{:016X}", fastrand::u64(..)), "iat": now, "iss": issuer.public_key(), "sub": subject.public_key(),
        "name": "test", "nats": nats,
    });
    if let Some(valid_secs) = valid_secs {
        claims["exp"] = now.saturating_add_signed(valid_secs).into();
    }
    let encode = |value: &serde_json::Value| BASE64.encode(value.to_string());
    let signed = format!("{}.{}", encode(&serde_json::json!({"typ": "JWT", "alg": "ed25519-nkey"})), encode(&claims));
    let signature = issuer.sign(signed.as_bytes()).expect("a new key can sign");
    format!("{signed}.{}", BASE64.encode(signature))
}
