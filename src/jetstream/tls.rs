//! TLS of a connection. The certificate of a server must be valid for the name or the address that the client connects to.
//! Servers of a cluster announce themselves by address, while certificates often have DNS names only. So an announced address may
//! also have a certificate for a DNS name of `nats.url`, as in other NATS clients. Nothing else is accepted
//! (`field::gossiped_addresses_*`, `field::a_gossiped_address_*`).
//!
//! The files are read again at each handshake, so that a replaced file is used from the next connect on. They are small, and
//! `secrets` has checked them, so they are read without leaving the handshake.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_nats::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use async_nats::rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use async_nats::rustls::crypto::{self, CryptoProvider};
use async_nats::rustls::pki_types::pem::PemObject;
use async_nats::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use async_nats::rustls::sign::CertifiedKey;
use async_nats::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use async_nats::{ServerAddr, ServerInfo};

use crate::config::{Nats, Tls};

/// `None` if the client must use its own: it reads the authorities of this system even if `nats.tls.ca_file` replaces them, and
/// does not connect if it cannot read one of them.
pub(super) fn client_config(nats: &Nats) -> Option<ClientConfig> {
    if nats.tls.ca_file.is_some() && !rustls_native_certs::load_native_certs().errors.is_empty() {
        tracing::info!("cannot read the certificates of this system; nats.tls.ca_file replaces them");
        return None;
    }
    let provider = Arc::new(crypto::ring::default_provider());
    let verifier =
        Verifier { servers: configured(&nats.url), ca_file: nats.tls.ca_file.clone(), provider: provider.clone() };
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("the provider supports the default versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match &nats.tls {
        Tls { cert_file: Some(cert), key_file: Some(key), .. } => {
            let certificate = ClientCertificate { cert: cert.clone(), key: key.clone(), provider };
            builder.with_client_cert_resolver(Arc::new(certificate))
        }
        _ => builder.with_no_client_auth(),
    };
    // A resumed session is not verified again.
    config.resumption = Resumption::disabled();
    Some(config)
}

/// Which names the certificates of announced servers must have, if `nats.url` names fewer servers than the cluster has. For the
/// operator, before a fail-over needs it.
pub fn announced_by_address(nats: &Nats, info: &ServerInfo) -> Option<String> {
    let servers = configured(&nats.url);
    let is_tls = info.tls_required || nats.tls.is_wanted();
    if !is_tls || servers.len() >= info.connect_urls.len() {
        return None;
    }
    let is_new = |address: &&String| {
        let name = address.parse().ok().and_then(|server| server_name(&server));
        name.is_some_and(|name| is_address(&name) && !servers.contains(&name))
    };
    let mut announced: Vec<&str> = info.connect_urls.iter().filter(is_new).map(String::as_str).collect();
    announced.sort_unstable();
    (!announced.is_empty()).then(|| {
        format!(
            "nats.url names {} of the {} servers of the cluster, and the cluster announces {} by address: {}; if a server has a \
             certificate for another name, add this name to nats.url, or the daemon cannot use the server",
            servers.len(),
            info.connect_urls.len(),
            announced.join(", "),
            accepted_names(nats)
        )
    })
}

/// What the certificate of an announced server must be valid for.
pub(super) fn accepted_names(nats: &Nats) -> String {
    let servers = configured(&nats.url);
    let mut names: Vec<String> = dns_names(&servers).map(|name| name.to_str().into_owned()).collect();
    names.sort_unstable();
    names.insert(0, "its address".to_owned());
    format!("the certificate of each must be valid for {}", names.join(" or "))
}

/// The hosts of `nats.url`.
fn configured(url: &str) -> HashSet<ServerName<'static>> {
    url.split(',').filter_map(|server| server_name(&server.trim().parse().ok()?)).collect()
}

fn server_name(server: &ServerAddr) -> Option<ServerName<'static>> {
    ServerName::try_from(server.host()).ok().map(|name| name.to_owned())
}

fn dns_names<'a>(servers: &'a HashSet<ServerName<'static>>) -> impl Iterator<Item = &'a ServerName<'static>> {
    servers.iter().filter(|name| !is_address(name))
}

fn is_address(name: &ServerName<'_>) -> bool {
    matches!(name, ServerName::IpAddress(_))
}

#[derive(Debug)]
struct Verifier {
    servers: HashSet<ServerName<'static>>,
    ca_file: Option<PathBuf>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn of_names(&self) -> Result<Arc<WebPkiServerVerifier>, Error> {
        let mut roots = RootCertStore::empty();
        match &self.ca_file {
            Some(file) => {
                for certificate in certificates(file)? {
                    roots.add(certificate)?;
                }
            }
            // The client has reported the files that cannot be read.
            None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
        }
        let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone());
        builder.build().map_err(|error| Error::General(error.to_string()))
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verifier = self.of_names()?;
        let verify =
            |name: &ServerName<'_>| verifier.verify_server_cert(end_entity, intermediates, name, ocsp_response, now);
        let verified = verify(server_name);
        let is_announced = is_address(server_name) && !self.servers.contains(server_name);
        match &verified {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if is_announced => dns_names(&self.servers).find_map(|name| verify(name).ok()).map_or(verified, Ok),
            _ => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[derive(Debug)]
struct ClientCertificate {
    cert: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
}

impl ClientCertificate {
    fn read(&self) -> Result<CertifiedKey, Error> {
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| Error::General(error.to_string()))?;
        CertifiedKey::from_der(certificates(&self.cert)?, key, &self.provider)
    }
}

impl ResolvesClientCert for ClientCertificate {
    /// Without a certificate the server refuses the handshake. `why` names the file then.
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.read().ok().map(Arc::new)
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    read.map_err(|error| Error::General(format!("{}: {error}", file.display())))
}
