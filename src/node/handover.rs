//! Passes a node's listeners on to the process that takes its place. Connections that arrive after
//! the old process has stopped accepting wait in the listeners themselves, so none is refused.

use crate::NodeError;
use crate::listeners::Listeners;
use cresset_commands::socket;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Listeners that are passed on at most.
const MAX_LISTENERS: usize = 4;

/// Other handles of a node's listeners, in the order of `Listeners`.
pub(super) struct SharedListeners {
    handles: Vec<OwnedFd>,
    has_gateway: bool,
}

impl Listeners {
    /// Other handles of the same listeners.
    pub(super) fn shared(&self) -> io::Result<SharedListeners> {
        let all = [Some(&self.public), self.operator.as_ref(), self.gateway.as_ref()];
        let all = all.into_iter().flatten().chain(&self.cluster);
        let handles = all.map(|listener| listener.as_fd().try_clone_to_owned());
        let handles = handles.collect::<io::Result<_>>()?;
        Ok(SharedListeners { handles, has_gateway: self.gateway.is_some() })
    }
}

/// What a message of listeners says: that the third one is the gateway's, as in programs that knew
/// no other, or that it is not.
const WITH_GATEWAY: u8 = b'L';
const WITHOUT_GATEWAY: u8 = b'C';

fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("handover.sock")
}

/// Gives the listeners to the first process of the node's own user that asks for them, and tells
/// `taken`. Answers until `stop`, then removes the socket.
pub(super) async fn give(
    data_dir: PathBuf,
    listeners: SharedListeners,
    taken: CancellationToken,
    stop: CancellationToken,
) {
    let given = async {
        let asking = socket::bind_at(&path(&data_dir))?;
        let (asked, _) = asking.accept().await?;
        let asked = asked.into_std()?;
        asked.set_nonblocking(false)?;
        send(&asked, &listeners)
    };
    match stop.run_until_cancelled(given).await {
        Some(Ok(())) => taken.cancel(),
        Some(Err(error)) => tracing::error!(%error, "the listeners cannot be passed on"),
        None => {}
    }
    let _ = std::fs::remove_file(path(&data_dir));
}

fn send(to: &UnixStream, listeners: &SharedListeners) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_LISTENERS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let handles: Vec<_> = listeners.handles.iter().map(AsFd::as_fd).collect();
    if !control.push(SendAncillaryMessage::ScmRights(&handles)) {
        return Err(io::Error::other("there are more listeners than can be passed on"));
    }
    let letter = if listeners.has_gateway { WITH_GATEWAY } else { WITHOUT_GATEWAY };
    sendmsg(to, &[IoSlice::new(&[letter])], &mut control, SendFlags::empty())?;
    Ok(())
}

/// The listeners of the node that runs on the folder, which accepts nothing more from then on.
pub(super) fn take(data_dir: &Path) -> Result<Listeners, NodeError> {
    let unable = |error: io::Error| {
        NodeError::new(format!(
            "no node on {} passes its listeners on: {error}",
            data_dir.display()
        ))
        .remedy("`cresset status` says whether one runs; start one with `cresset serve`")
    };
    let (handles, has_gateway) = receive(&path(data_dir)).map_err(unable)?;
    let mut all = handles.into_iter().map(|handle| {
        let listener = std::net::TcpListener::from(handle);
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    let mut next = || all.next().transpose().map_err(unable);
    let missing = || unable(ErrorKind::UnexpectedEof.into());
    let public = next()?.ok_or_else(missing)?;
    let operator = Some(next()?.ok_or_else(missing)?);
    let gateway = if has_gateway { next()? } else { None };
    Ok(Listeners { public, operator, gateway, cluster: next()? })
}

/// The handles, and whether the third one is the gateway's.
fn receive(from: &Path) -> io::Result<(Vec<OwnedFd>, bool)> {
    let stream = UnixStream::connect(from)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_LISTENERS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut letter = [0];
    recvmsg(&stream, &mut [IoSliceMut::new(&mut letter)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut handles = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            handles.extend(rights);
        }
    }
    Ok((handles, letter[0] == WITH_GATEWAY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    #[tokio::test(flavor = "multi_thread")]
    async fn connections_wait_for_the_one_that_takes_the_listeners() {
        let folder = tempfile::tempdir().unwrap();
        assert!(take(folder.path()).is_err(), "nobody gives them");
        let bind = || TcpListener::bind("127.0.0.1:0");
        let old = Listeners {
            public: bind().await.unwrap(),
            operator: bind().await.ok(),
            gateway: None,
            cluster: Some(bind().await.unwrap()),
        };
        let told = old.cluster.as_ref().unwrap().local_addr().unwrap();
        let (taken, stop) = (CancellationToken::new(), CancellationToken::new());
        let address = old.public.local_addr().unwrap();
        let shared = old.shared().unwrap();
        let dir = folder.path().to_owned();
        let giving = tokio::spawn(give(dir, shared, taken.clone(), stop.clone()));
        while !path(folder.path()).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let new = take(folder.path()).unwrap();
        taken.cancelled().await;
        giving.await.unwrap();
        drop(old);
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"x").await.unwrap();
        let (mut accepted, _) = new.public.accept().await.unwrap();
        assert_eq!(accepted.read_u8().await.unwrap(), b'x');
        assert_eq!(new.public.local_addr().unwrap(), address);
        assert_eq!(new.cluster.as_ref().unwrap().local_addr().unwrap(), told);
        assert!(new.gateway.is_none() && take(folder.path()).is_err(), "they are given once");
    }
}
