//! TLS: the certificate that listeners show, and connections to nodes at https addresses.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod peers;
mod settings;
mod validity;

pub use peers::PeerTls;
pub use settings::{ClusterSettings, ListenerName, TlsSettings};

use hyper::Uri;
use parking_lot::RwLock;
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tokio_util::either::Either;
pub use validity::ends_soon;

/// A connection with or without TLS, whose state is large.
pub type Socket = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// Which listeners speak TLS, and the certificate that they show.
#[derive(Debug, Default)]
pub struct TlsListeners {
    shown: Option<Arc<ShownCertificate>>,
    names: Vec<ListenerName>,
    /// For the listener of other nodes.
    peers: Option<Arc<PeerTls>>,
}

/// A certificate with its key. It can be read again while listeners show it: connections that are
/// opened later are shown the new one.
#[derive(Debug)]
struct ShownCertificate {
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
}

impl TlsListeners {
    /// Reads certificate and key. The error is a sentence that names the file.
    pub fn read(settings: &TlsSettings) -> Result<Self, String> {
        let TlsSettings { certificate: Some(certificate), key: Some(key), .. } = settings else {
            return Ok(Self::default());
        };
        let shown = ShownCertificate::read(certificate, key)?;
        Ok(Self { shown: Some(shown), names: settings.listeners.clone(), peers: None })
    }

    /// Adds what the listener of other nodes shows and asks for.
    pub fn with_peers(self, settings: &ClusterSettings) -> Result<Self, String> {
        Ok(Self { peers: PeerTls::read(settings)?.map(Arc::new), ..self })
    }

    /// `None` where the node knows no other nodes.
    pub fn peers(&self) -> Option<&Arc<PeerTls>> {
        self.peers.as_ref()
    }

    /// Reads the files again, and says whether a certificate is another one. What cannot be read
    /// changes nothing.
    pub fn read_again(&self) -> Result<bool, String> {
        let own = self.shown.as_ref().map_or(Ok(false), |shown| shown.read_again())?;
        Ok(self.peers.as_ref().map_or(Ok(false), |peers| peers.read_again())? || own)
    }

    /// Accepts the connections of a listener that speaks TLS.
    pub fn acceptor(&self, listener: ListenerName) -> Option<TlsAcceptor> {
        let shown = self.shown.clone().filter(|_| self.names.contains(&listener))?;
        let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("invariant: the library supports its own versions")
            .with_no_client_auth()
            .with_cert_resolver(shown);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Some(Arc::new(config).into())
    }

    /// Unix time, seconds, after which the certificate of a listener is not valid; `None` if it
    /// shows none.
    pub fn not_after(&self, listener: ListenerName) -> Option<u64> {
        self.shown.as_ref().filter(|_| self.names.contains(&listener))?.not_after()
    }

    /// The address of a listener, with its scheme.
    pub fn url(&self, listener: ListenerName, address: SocketAddr) -> String {
        let is_secured = self.shown.is_some() && self.names.contains(&listener);
        format!("{}://{address}", if is_secured { "https" } else { "http" })
    }
}

impl ShownCertificate {
    fn read(certificate: &Path, key: &Path) -> Result<Arc<Self>, String> {
        let current = RwLock::new(certified(certificate, key)?);
        Ok(Arc::new(Self { certificate: certificate.into(), key: key.into(), current }))
    }

    fn read_again(&self) -> Result<bool, String> {
        let read = certified(&self.certificate, &self.key)?;
        let mut current = self.current.write();
        let is_other = current.cert != read.cert;
        *current = read;
        Ok(is_other)
    }

    fn current(&self) -> Arc<CertifiedKey> {
        self.current.read().clone()
    }

    /// The others of the chain are left out: clients that trust one of them need none behind it.
    fn not_after(&self) -> Option<u64> {
        validity::not_after(self.current().cert.first()?)
    }
}

impl ResolvesServerCert for ShownCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

fn certified(certificate: &Path, key: &Path) -> Result<Arc<CertifiedKey>, String> {
    let read = PrivateKeyDer::from_pem_file(key);
    let private = read.map_err(|error| unreadable(key, "private key", &error))?;
    let pair =
        CertifiedKey::from_der(certificates(certificate)?, private, &ring::default_provider());
    pair.map(Arc::new).map_err(|error| {
        format!("{} and {} cannot be used together: {error}", certificate.display(), key.display())
    })
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let all: Vec<_> = read.map_err(|error| unreadable(file, "certificate", &error))?;
    if all.is_empty() {
        return Err(format!("{} holds no certificate: a PEM file is needed", file.display()));
    }
    Ok(all)
}

fn unreadable(file: &Path, what: &str, error: &dyn Debug) -> String {
    format!("{} holds no {what} that can be read: {error:?}", file.display())
}

/// How this program speaks TLS to nodes. It trusts the public authorities, and those whose
/// certificates stand in the PEM file `trusted`.
pub fn client(trusted: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(file) = trusted {
        trust(&mut roots, file)?;
    }
    Ok(ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("invariant: the library supports its own versions")
        .with_root_certificates(roots)
        .with_no_client_auth())
}

/// Adds the certificates of a file.
fn trust(roots: &mut RootCertStore, file: &Path) -> Result<(), String> {
    certificates(file)?.into_iter().try_for_each(|certificate| {
        let added = roots.add(certificate);
        added.map_err(|error| format!("{}: {error}", file.display()))
    })
}

/// Where a node is reached.
#[derive(Clone, Debug)]
pub struct NodeAddress {
    /// `http://host:port` or `https://host:port`.
    pub url: String,
    /// `host:port`.
    pub authority: String,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

impl NodeAddress {
    /// `trusted` is a PEM file, as [`client`] takes it. The error is a sentence that says what is
    /// wrong.
    pub fn new(url: &str, trusted: Option<&Path>) -> Result<Self, String> {
        Self::with(url, || client(trusted).map(Arc::new))
    }

    /// `new` with this configuration of TLS.
    fn with(
        url: &str,
        config: impl FnOnce() -> Result<Arc<ClientConfig>, String>,
    ) -> Result<Self, String> {
        let wrong = || {
            format!("{url:?} is not an address like http://127.0.0.1:8080 or https://node.example")
        };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let host = uri.host().ok_or_else(wrong)?;
        let (port, tls) = match uri.scheme_str() {
            Some("http") => (80, None),
            Some("https") => {
                let bare = host.trim_matches(['[', ']']).to_owned();
                let name = ServerName::try_from(bare).map_err(|_| wrong())?;
                (443, Some((config()?, name)))
            }
            _ => return Err(wrong()),
        };
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(port));
        Ok(Self { url: url.trim_end_matches('/').to_owned(), authority, tls })
    }

    /// Whether nobody else can read what is sent there: by TLS, or because it stays on this
    /// machine.
    pub fn is_private(&self) -> bool {
        let host = self.host();
        let address = host.parse::<IpAddr>();
        self.tls.is_some() || host == "localhost" || address.is_ok_and(|ip| ip.is_loopback())
    }

    fn host(&self) -> String {
        let host = self.authority.rsplit_once(':').map_or("", |(host, _)| host);
        host.trim_matches(['[', ']']).to_owned()
    }

    pub async fn connect(&self) -> io::Result<Socket> {
        let stream = TcpStream::connect(&self.authority).await?;
        stream.set_nodelay(true)?;
        match self.tls.clone() {
            None => Ok(Either::Left(stream)),
            Some((config, name)) => {
                let connecting = TlsConnector::from(config).connect(name, stream);
                Ok(Either::Right(Box::new(Box::pin(connecting).await?.into())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let check = |url: &str, expect: Option<&str>| {
            let found = NodeAddress::new(url, None).ok();
            assert_eq!(found.as_ref().map(|at| at.authority.as_str()), expect, "{url}");
        };
        check("http://127.0.0.1:8080", Some("127.0.0.1:8080"));
        check("http://[::1]:9/", Some("[::1]:9"));
        check("http://node", Some("node:80"));
        check("https://node", Some("node:443"));
        check("https://[::1]", Some("[::1]:443"));
        check("127.0.0.1:8080", None);
        check("ftp://node", None);
        check("", None);
    }
}
