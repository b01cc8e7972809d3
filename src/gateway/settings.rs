//! The settings of the gateway.

use cresset_base::section;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

section! {
/// The node's own gateway: a listener for clients that send no headers of theirs, know models by
/// name, or speak in other services' spellings. `cresset relay` is the same in a process of its
/// own.
pub struct GatewaySettings {
    /// Its address. Absent: there is no gateway.
    pub listen: Option<SocketAddr> = None,
    /// File with a key that is sent in place of what clients send, which then need none. Only for
    /// an address that other machines cannot reach.
    pub key_file: Option<PathBuf> = None,
    /// Names besides `localhost` and its IP address under which clients may address it.
    pub names: Vec<String> = Vec::new(),
    /// Origins of web pages that may use it, such as `http://localhost:3000`.
    pub origins: Vec<String> = Vec::new(),
    /// Further names of models: a client that names the left one means the model on the right. A
    /// left one that ends in `*` stands for every name that begins so, such as `claude-*`.
    pub aliases: BTreeMap<String, String> = BTreeMap::new(),
    /// Open connections. Each takes three of the files that the system lets the process open, and
    /// further ones wait.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_connections: usize = 256,
}
}
