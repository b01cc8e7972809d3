//! What a node listens on.

use tokio::net::TcpListener;

/// The listeners of a node.
pub(super) struct Listeners {
    pub public: TcpListener,
    /// Absent in a program without the feature `console`.
    pub operator: Option<TcpListener>,
    pub gateway: Option<TcpListener>,
    /// That of other nodes.
    pub cluster: Option<TcpListener>,
}
