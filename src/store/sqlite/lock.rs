//! One process per database file: an advisory lock on `<database>.lock`, which also names its holder.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::open::{beside, give_to_owner, unusable};
use crate::store::{Holder, OpenError};

/// Written by a repair, which ends by itself, unlike a daemon.
const REPAIR: &str = ", audit --repair";
/// Written when a shutdown begins. A clean exit deletes the file, so finding this text means that the shutdown was interrupted.
const STOPPING: &str = ", stopping";

/// The lock, held until it is dropped. The kernel releases it when the process ends, in whatever way.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    file: File,
    after_stop: bool,
}

/// Why the lock was not taken.
#[derive(Debug)]
pub enum LockError {
    /// Another process has it; the text names it.
    Held(Holder),
    Io(io::Error),
}

impl Lock {
    /// Takes the lock, or returns its holder. Does not wait.
    pub fn try_acquire(database: &Path) -> Result<Self, LockError> {
        let path = path(database);
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let mut file = options.open(&path).map_err(LockError::Io)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => return Err(LockError::Held(holder(&mut file))),
                Err(std::fs::TryLockError::Error(error)) => return Err(LockError::Io(error)),
            }
            // The last holder deletes the file while it still has the lock: the locked file may be gone from the folder.
            if is_still_at(&file, &path) {
                let after_stop = signature(&mut file).ends_with(STOPPING);
                let mut lock = Self { path, file, after_stop };
                // If this process is killed, the file stays, and the daemon must be able to lock it.
                give_to_owner(&lock.path, database);
                // On a full disk the file does not name its holder, but the lock holds.
                lock.sign("");
                return Ok(lock);
            }
        }
    }

    /// Whether the last holder was killed during its shutdown. Then it was stopped on purpose and did not crash.
    pub fn comes_after_a_stop(&self) -> bool {
        self.after_stop
    }

    /// Writes that a repair holds the lock, for a process that waits for the database.
    pub fn sign_as_repair(&mut self) {
        self.sign(REPAIR);
    }

    fn sign(&mut self, purpose: &str) {
        if let Err(error) = sign(&mut self.file, purpose) {
            tracing::warn!(lock = %self.path.display(), %error, "cannot write who holds the database");
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A file that stays does no harm: nothing locks it then.
        drop(std::fs::remove_file(&self.path));
    }
}

/// The text never becomes shorter, so that a reader never finds an empty file.
fn sign(file: &mut File, purpose: &str) -> io::Result<()> {
    let text = format!("process {}{purpose}", std::process::id());
    file.rewind()?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

/// Records that this process, which has the lock, begins its shutdown. The next holder reads it if the shutdown is interrupted.
pub fn sign_as_stopping(database: &Path) {
    let signed = OpenOptions::new().write(true).open(path(database)).and_then(|mut file| sign(&mut file, STOPPING));
    if let Err(error) = signed {
        tracing::debug!(%error, "cannot note the stop");
    }
}

/// The lock file of a database.
pub fn path(database: &Path) -> PathBuf {
    beside(database, ".lock")
}

/// The process that has the lock of the database. Waits for nothing and leaves nothing behind.
pub fn held_by(database: &Path) -> Result<Option<Holder>, OpenError> {
    let path = path(database);
    let looked = match File::open(&path) {
        Ok(mut file) => match file.try_lock() {
            Ok(()) => Ok(None),
            Err(std::fs::TryLockError::WouldBlock) => Ok(Some(holder(&mut file))),
            Err(std::fs::TryLockError::Error(error)) => Err(error),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    looked.map_err(|error| unusable(&path, error))
}

fn holder(file: &mut File) -> Holder {
    let name = match signature(file) {
        text if text.is_empty() => "another process".to_owned(),
        text => text,
    };
    Holder { is_repair: name.ends_with(REPAIR), name }
}

/// Empty while the holder is between locking and signing.
fn signature(file: &mut File) -> String {
    let mut text = String::new();
    match file.take(100).read_to_string(&mut text) {
        Ok(_) => text,
        Err(_) => String::new(),
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(theirs)) => ours.dev() == theirs.dev() && ours.ino() == theirs.ino(),
        (Err(_), _) | (_, Err(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stop_that_was_cut_short_is_known_to_the_next_holder() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("x.db");
        for cut_short in [false, true, false] {
            let lock = Lock::try_acquire(&database).unwrap();
            sign_as_stopping(&database);
            if cut_short {
                // As the kernel does it for a process that is killed.
                lock.file.unlock().unwrap();
                std::mem::forget(lock);
            } else {
                drop(lock);
            }
            let lock = Lock::try_acquire(&database).unwrap();
            assert_eq!(lock.comes_after_a_stop(), cut_short);
            // Killed without having been told to stop.
            lock.file.unlock().unwrap();
            std::mem::forget(lock);
            assert!(!Lock::try_acquire(&database).unwrap().comes_after_a_stop());
        }
    }

    #[test]
    fn a_repair_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("x.db");
        let mut lock = Lock::try_acquire(&database).unwrap();
        assert!(!held_by(&database).unwrap().unwrap().is_repair);
        lock.sign_as_repair();
        let name = format!("process {}, audit --repair", std::process::id());
        assert_eq!(held_by(&database).unwrap(), Some(Holder { name, is_repair: true }));
    }

    #[test]
    fn second_taker_learns_who_holds_it_and_gets_it_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("x.db");
        let lock = Lock::try_acquire(&database).unwrap();
        match Lock::try_acquire(&database) {
            Err(LockError::Held(holder)) => assert_eq!(holder.name, format!("process {}", std::process::id())),
            other => panic!("{other:?}"),
        }
        let name = format!("process {}", std::process::id());
        assert_eq!(held_by(&database).unwrap(), Some(Holder { name, is_repair: false }));
        drop(lock);
        assert_eq!(held_by(&database).unwrap(), None);
        drop(Lock::try_acquire(&database).unwrap());
        assert!(!folder.path().join("x.db.lock").exists());
    }
}
