//! The marker beside the database that makes the daemon let go of it, `<database>.paused`.
//!
//! A file and not a row: the database may be away for service, and the pause must outlast that, the daemon and the machine.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::store::{OpenError, beside, folder, give_to_owner};

/// How often the daemon looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Who paused the daemon, when and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// Empty if the marker does not say.
    pub by: String,
    /// RFC 3339.
    pub at: String,
    pub reason: Option<String>,
}

impl std::fmt::Display for Pause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.by.is_empty() {
            return write!(f, "by a marker that cannot be read");
        }
        write!(f, "by {} since {}", self.by, self.at)?;
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}

/// The marker that belongs to a database.
pub fn marker(database: &Path) -> PathBuf {
    beside(database, ".paused")
}

/// The pause that is on, if there is one. A marker that cannot be read is one all the same.
///
/// # Errors
/// When it cannot even be told whether there is a marker.
pub fn look(database: &Path) -> Result<Option<Pause>, OpenError> {
    let path = marker(database);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
        // With its folder the marker is away as well, a disk that is serviced for one: that ends no pause.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder(database).is_dir() => {
            Err(OpenError::MissingFolder(folder(database).to_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // Another user's. Behind a folder that cannot be entered it would not be seen either.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && path.symlink_metadata().is_ok() => {
            Ok(Some(Pause::default()))
        }
        Err(error) => Err(OpenError::unseen(&path, error)),
    }
}

/// Looks once a second, and returns when a pause is on.
pub async fn begins(database: &Path) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if matches!(look(database), Ok(Some(_))) {
            return;
        }
    }
}

/// Puts the marker there, so that it is there also after a power cut. `AlreadyExists` if a pause is on.
///
/// # Errors
/// Whatever the file system says.
pub fn begin(database: &Path, pause: &Pause) -> io::Result<()> {
    let path = marker(database);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    let written = write(file, &path, database, pause);
    if written.is_err() {
        // Whatever is there is a pause, and we are about to say that there is none.
        drop(std::fs::remove_file(&path));
    }
    written
}

fn write(mut file: File, path: &Path, database: &Path, pause: &Pause) -> io::Result<()> {
    file.write_all(serde_json::to_string(pause)?.as_bytes())?;
    file.write_all(b"\n")?;
    // Root may pause a daemon of another user, who is to read why.
    give_to_owner(path, database);
    file.sync_all()?;
    File::open(folder(path))?.sync_all()
}

/// Takes the marker away.
///
/// # Errors
/// Whatever the file system says, `NotFound` if no pause is on.
pub fn end(database: &Path) -> io::Result<()> {
    let path = marker(database);
    std::fs::remove_file(&path)?;
    File::open(folder(&path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_on_from_its_marker_to_its_end_and_also_if_the_marker_is_garbled() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("x.db");
        assert_eq!(look(&database).unwrap(), None);
        let pause = Pause { by: "ops@db1".into(), at: "2026-11-29T21:00:00Z".into(), reason: Some("new disk".into()) };
        begin(&database, &pause).unwrap();
        assert_eq!(look(&database).unwrap(), Some(pause.clone()));
        assert_eq!(pause.to_string(), "by ops@db1 since 2026-11-29T21:00:00Z: new disk");
        assert_eq!(begin(&database, &pause).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::write(marker(&database), "{").unwrap();
        assert_eq!(look(&database).unwrap().unwrap().to_string(), "by a marker that cannot be read");
        end(&database).unwrap();
        assert_eq!(look(&database).unwrap(), None);
        assert_eq!(end(&database).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
