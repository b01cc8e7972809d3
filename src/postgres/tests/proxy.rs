//! A way to the database that breaks when a test wants it to.

use super::cluster::place_in;
use crate::PostgresConfig;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use tempfile::TempDir;

pub struct Proxy {
    folder: TempDir,
    wires: Arc<Wires>,
}

#[derive(Default)]
struct Wires {
    next_cut: Mutex<Option<NextCut>>,
    open: Mutex<Vec<UnixStream>>,
}

/// When all connections are cut.
struct NextCut {
    /// Portions of bytes, of either direction, until then.
    portions: u32,
    /// Whether the last portion still arrives.
    arrives: bool,
}

impl Proxy {
    /// A proxy before the socket in `server`.
    pub fn before(server: &Path) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = ".s.PGSQL.5432";
        let (listener, target) =
            (UnixListener::bind(folder.path().join(socket)).unwrap(), server.join(socket));
        let wires = Arc::new(Wires::default());
        let accepting = Arc::clone(&wires);
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let Ok(server) = UnixStream::connect(&target) else { continue };
                let kept = [&client, &server].map(|end| end.try_clone().unwrap());
                accepting.open.lock().unwrap().extend(kept);
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let wires = Arc::clone(&accepting);
                    thread::spawn(move || wires.forward(from, to));
                }
            }
        });
        Self { folder, wires }
    }

    /// The same place by way of the proxy.
    pub fn place(&self, place: &PostgresConfig) -> PostgresConfig {
        place_in(self.folder.path(), place.server.get_options().unwrap())
    }

    /// Cuts all connections at this portion of bytes, before or after it has arrived.
    pub fn cut_after(&self, portions: u32, arrives: bool) {
        *self.wires.next_cut.lock().unwrap() = Some(NextCut { portions, arrives });
    }

    /// Lets everything pass from now on. No cut is under way any more.
    pub fn mend(&self) {
        *self.wires.next_cut.lock().unwrap() = None;
    }
}

impl Wires {
    fn forward(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            let mut next_cut = self.next_cut.lock().unwrap();
            let cut = next_cut.as_mut().is_some_and(|cut| cut.portions == 0);
            let arrives = next_cut.as_ref().is_none_or(|cut| cut.portions > 0 || cut.arrives);
            if let Some(next) = next_cut.as_mut() {
                next.portions = next.portions.saturating_sub(1);
            }
            if arrives && to.write_all(&bytes[..length]).is_err() {
                break;
            }
            if cut {
                *next_cut = None;
                for end in self.open.lock().unwrap().drain(..) {
                    let _ = end.shutdown(Shutdown::Both);
                }
                return;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }
}
