//! The settings of TLS, for listeners, for commands and between nodes.

use cresset_base::section;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

section! {
/// TLS of the node's listeners, and of commands that are given an https:// address.
pub struct TlsSettings {
    /// PEM file with the certificate that listeners show, followed by those that lead to its
    /// issuer. A reload reads it and the key again. Absent: no listener speaks TLS.
    pub certificate: Option<PathBuf> = None,
    /// PEM file with the certificate's private key.
    pub key: Option<PathBuf> = None,
    /// The listeners that speak TLS: `public`, `operator`, `gateway`. Where `public` does, the node
    /// has a free port of 127.0.0.1 without TLS besides, for its own gateway and for commands on
    /// this machine.
    pub listeners: Vec<ListenerName> = vec![ListenerName::Public],
    /// PEM file with certificates of authorities that `relay`, `bench`, `connect` and connections
    /// to the ledger's database trust besides the public ones.
    pub trusted: Option<PathBuf> = None,
}
}

/// A listener, as `tls.listeners` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListenerName {
    Public,
    Operator,
    Gateway,
}

impl ListenerName {
    pub const ALL: [Self; 3] = [Self::Public, Self::Operator, Self::Gateway];

    pub fn word(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Operator => "operator",
            Self::Gateway => "gateway",
        }
    }
}

section! {
/// How nodes that share a ledger in a database pass requests on to each other. Of `listen`,
/// `certificate`, `key` and `authority`, all are needed or none.
pub struct ClusterSettings {
    /// Address at which other nodes, and nobody else, are accepted. Absent: the node passes no
    /// request on and takes none from others.
    pub listen: Option<SocketAddr> = None,
    /// Name or IP address under which other nodes reach `listen`, with a port where theirs is
    /// another one; the certificate must be valid for it. Absent: the address of `listen`.
    pub address: Option<String> = None,
    /// PEM file with the certificate that the node shows to others, for both ends of a connection,
    /// followed by those that lead to the authority. A reload reads it and the key again.
    pub certificate: Option<PathBuf> = None,
    /// PEM file with the certificate's private key.
    pub key: Option<PathBuf> = None,
    /// PEM file with the certificates of the authorities that sign the certificates of all nodes,
    /// and of nobody else.
    pub authority: Option<PathBuf> = None,
    /// Connections from other nodes that may be open at once, and as many to them. Each takes one
    /// of the files that the system lets the process open.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_connections: usize = 256,
}
}
