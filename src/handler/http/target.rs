//! Where a request goes: scheme, host and port, or a socket, and the path there.

use std::path::{Path, PathBuf};

use hyper::Uri;
use hyper::header::HeaderValue;
use tokio_rustls::rustls::pki_types::ServerName;

/// An address, and what the first line of a request and its header `Host` say.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub address: Address,
    /// Path and query. Never shown, because it may have a token.
    pub path: Uri,
    pub host_header: HeaderValue,
    /// Scheme, name and port, or the socket: the name of the host in texts and metrics.
    pub host: String,
}

#[derive(Clone, Debug)]
pub(super) enum Address {
    Tcp { host: String, port: u16, tls: Option<ServerName<'static>> },
    Unix(PathBuf),
}

impl Target {
    /// # Errors
    /// What is wrong. The text does not repeat the URL, which may have a secret.
    pub fn parse(url: &str, folder: &Path) -> Result<Self, String> {
        const FORMS: &str = "must begin with http://, https:// or unix:";
        if url.is_empty() {
            return Err("it is missing".to_owned());
        }
        let (scheme, rest) = url.split_once(':').ok_or(FORMS)?;
        match scheme {
            "unix" => unix(rest, folder),
            "http" | "https" if rest.starts_with("//") => tcp(url, scheme == "https"),
            _ => Err(FORMS.to_owned()),
        }
    }

    pub fn is_tls(&self) -> bool {
        matches!(self.address, Address::Tcp { tls: Some(_), .. })
    }
}

/// `/run/shop.sock:/orders`
fn unix(rest: &str, folder: &Path) -> Result<Target, String> {
    const FORM: &str = "must have the form unix:/run/shop.sock:/orders";
    let (socket, path) = rest.split_once(":/").ok_or(FORM)?;
    if socket.is_empty() {
        return Err(FORM.to_owned());
    }
    let path = format!("/{path}").parse().map_err(|_| "its path has characters that a URL cannot have")?;
    let socket = folder.join(socket);
    let host = format!("unix:{}", socket.display());
    Ok(Target { address: Address::Unix(socket), path, host_header: HeaderValue::from_static("localhost"), host })
}

fn tcp(url: &str, is_tls: bool) -> Result<Target, String> {
    let unfit = |_| "it is not a URL".to_owned();
    if url.contains('#') {
        return Err("a fragment (#) is never sent; remove it".to_owned());
    }
    let uri: Uri = url.parse().map_err(|_| "it is not a URL")?;
    let authority = uri.authority().ok_or("it has no host")?;
    if authority.as_str().contains('@') {
        return Err("it has a user or a password; put the login into header_files".to_owned());
    }
    let name = authority.host();
    if name.is_empty() {
        return Err("it has no host".to_owned());
    }
    let port = match authority.as_str()[name.len()..].strip_prefix(':') {
        None => {
            if is_tls {
                443
            } else {
                80
            }
        }
        Some(port) => match port.parse() {
            Ok(port @ 1..) => port,
            Ok(0) | Err(_) => return Err("its port is not a number from 1 to 65535".to_owned()),
        },
    };
    // An IPv6 address stands in brackets in a URL, and nowhere else.
    let host = name.trim_start_matches('[').trim_end_matches(']').to_owned();
    let tls = if is_tls {
        Some(ServerName::try_from(host.clone()).map_err(|_| "its host is not the name of a server")?)
    } else {
        None
    };
    let path = uri.path_and_query().map_or("/", |path| path.as_str()).parse().map_err(|_| "it is not a URL")?;
    let host_header = HeaderValue::from_str(authority.as_str()).map_err(unfit)?;
    let scheme = if is_tls { "https" } else { "http" };
    let shown = format!("{scheme}://{}:{port}", name.to_ascii_lowercase());
    Ok(Target { address: Address::Tcp { host, port, tls }, path, host_header, host: shown })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Target, String> {
        Target::parse(url, Path::new("/etc/shop"))
    }

    #[test]
    fn a_host_is_scheme_name_and_port_or_a_socket() {
        for (url, host, path, header) in [
            ("http://shop.example", "http://shop.example:80", "/", "shop.example"),
            ("https://Shop.example/a?token=1", "https://shop.example:443", "/a?token=1", "Shop.example"),
            ("http://127.0.0.1:8080/orders", "http://127.0.0.1:8080", "/orders", "127.0.0.1:8080"),
            ("http://[::1]:8080/orders", "http://[::1]:8080", "/orders", "[::1]:8080"),
            ("unix:/run/shop.sock:/orders?a=b", "unix:/run/shop.sock", "/orders?a=b", "localhost"),
            ("unix:shop.sock:/", "unix:/etc/shop/shop.sock", "/", "localhost"),
        ] {
            let target = parse(url).unwrap();
            assert_eq!(target.host, host);
            assert_eq!(target.path, path);
            assert_eq!(target.host_header, header);
            assert_eq!(target.is_tls(), url.starts_with("https"), "{url}");
        }
    }

    #[test]
    fn what_is_not_an_address_is_refused_without_repeating_it() {
        for url in [
            "",
            "shop.example/secret",
            "ftp://shop/secret",
            "http:/shop/secret",
            "http:///secret",
            "http://anna:secret@shop/",
            "http://shop:x/secret",
            "http://shop:/secret",
            "http://shop:99999/secret",
            "http://shop/secret#part",
            "http://shop/sec ret",
            "https://-/secret ",
            "unix:/run/shop.sock",
            "unix::/orders",
        ] {
            let problem = parse(url).expect_err(url);
            assert!(!problem.contains("secret"), "{problem}");
        }
    }
}
