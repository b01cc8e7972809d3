//! Mutual TLS between the nodes that share a ledger: each shows a certificate that their own
//! authority has signed, and accepts no other. What arrives in this way comes from a node, and from
//! no client.

use super::{NodeAddress, ShownCertificate, trust};
use crate::settings::ClusterSettings;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, Error, RootCertStore, ServerConfig, SignatureScheme,
};

/// What a node shows to the others, and how it tells that one of them is a node.
#[derive(Debug)]
pub struct PeerTls {
    own: Arc<ShownCertificate>,
    as_client: Arc<dyn ClientCertVerifier>,
    as_server: Arc<WebPkiServerVerifier>,
    client: Arc<ClientConfig>,
}

impl PeerTls {
    /// Reads the files; `None` where they are not set. The error is a sentence that names one.
    pub(super) fn read(settings: &ClusterSettings) -> Result<Option<Self>, String> {
        let ClusterSettings { certificate, key, authority, .. } = settings;
        let (Some(certificate), Some(key), Some(authority)) = (certificate, key, authority) else {
            return Ok(None);
        };
        let own = ShownCertificate::read(certificate, key)?;
        let mut roots = RootCertStore::empty();
        trust(&mut roots, authority)?;
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let unusable = |error| format!("{}: {error}", authority.display());
        let as_client =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
                .build()
                .map_err(unusable)?;
        let as_server =
            WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
                .build()
                .map_err(unusable)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("invariant: the library supports its own versions")
            .with_root_certificates(roots)
            .with_client_cert_resolver(own.clone());
        // Each connection proves anew who is at its ends.
        client.resumption = Resumption::disabled();
        Ok(Some(Self { own, as_client, as_server, client: client.into() }))
    }

    pub(super) fn read_again(&self) -> Result<bool, String> {
        self.own.read_again()
    }

    /// Unix time, seconds, after which the own certificate is not valid.
    pub fn not_after(&self) -> Option<u64> {
        self.own.not_after()
    }

    /// Accepts connections of other nodes alone.
    pub fn acceptor(&self) -> TlsAcceptor {
        let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("invariant: the library supports its own versions")
            .with_client_cert_verifier(self.as_client.clone())
            .with_cert_resolver(self.own.clone());
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Arc::new(config).into()
    }

    /// Where another node is reached that says so of itself. A connection to it fails unless its
    /// certificate is valid for that name or IP address.
    pub fn address(&self, told: &str) -> Result<NodeAddress, String> {
        NodeAddress::with(&format!("https://{told}"), || Ok(self.client.clone()))
    }

    /// Fails where others would refuse the own certificate at this address, but for its age: a
    /// node serves its own clients whether or not others reach it.
    pub fn check_own(&self, address: &str) -> Result<(), String> {
        let (own, now) = (self.own.current(), UnixTime::now());
        let [leaf, between @ ..] = &own.cert[..] else { return Ok(()) };
        let host = self.address(address)?.host();
        let name = ServerName::try_from(host).map_err(|error| error.to_string())?;
        let shown = self.own.certificate.display();
        let refused = |what: &str, error: &Error| match error {
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => Ok(()),
            error => Err(format!("other nodes would refuse {shown} {what}: {error}")),
        };
        let called = self.as_server.verify_server_cert(leaf, between, &name, &[], now);
        called.map(drop).or_else(|error| refused(&format!("at {address}"), &error))?;
        let calling = self.as_client.verify_client_cert(leaf, between, now);
        calling.map(drop).or_else(|error| refused("when it connects to them", &error))
    }
}

impl ResolvesClientCert for ShownCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
