//! Parquet: a table with a text column.

use std::collections::VecDeque;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{Documents, Record};
use crate::error::{Error, Result};

/// Rows per read.
const ROWS: usize = 256;

pub(super) struct Table {
    path: PathBuf,
    column: String,
    file: SerializedFileReader<File>,
    size: u64,
    rows: u64,
    /// The column's index in the table.
    index: usize,
    /// The definition level of a value that is present; null has a lower one.
    level: i16,
    next_group: usize,
    group: Option<ColumnReader>,
    read: VecDeque<Option<ByteArray>>,
    row: u64,
}

/// Calls the library and catches panics, because it panics on some damaged files instead of returning an error.
pub fn guarded<T>(
    call: impl FnOnce() -> std::result::Result<T, ParquetError>,
) -> std::result::Result<T, ParquetError> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err(ParquetError::General("its contents contradict each other".into())))
}

impl Table {
    pub fn open(path: &Path, column: &str) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path, "open"))?;
        let size = file.metadata().map_err(Error::io(path, "read"))?.len();
        let file = guarded(|| SerializedFileReader::new(file))
            .map_err(|error| Error::file(path, format!("is not a Parquet file that can be read: {error}")))?;
        let schema = file.metadata().file_metadata().schema_descr();
        let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
        let Some(index) = names.iter().position(|name| name == column) else {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            let message = format!(
                "has no column `{column}`; it has {}: name the one with the text with --text-column",
                names.join(", ")
            );
            return Err(Error::file(path, message));
        };
        let found = schema.column(index);
        if found.physical_type() != Type::BYTE_ARRAY || found.max_rep_level() > 0 {
            let list = if found.max_rep_level() > 0 { "lists of " } else { "" };
            let message = format!("column `{column}` holds {list}{}, not text", found.physical_type());
            return Err(Error::file(path, message));
        }
        let level = found.max_def_level();
        let rows = file.metadata().row_groups().iter().map(|group| group.num_rows().max(0) as u64).sum();
        let (path, column) = (path.into(), column.into());
        let read = VecDeque::new();
        Ok(Self { path, column, file, size, rows, index, level, next_group: 0, group: None, read, row: 0 })
    }

    fn failed(&self, error: &ParquetError) -> Error {
        let row = self.row + self.read.len() as u64 + 1;
        let message = format!("row {row}: could not read further: {error}; the file may be damaged");
        Error::file(&self.path, message)
    }

    /// Reads more rows; returns whether there were any.
    fn fill(&mut self) -> Result<bool> {
        loop {
            if self.group.is_none() {
                if self.next_group == self.file.num_row_groups() {
                    return Ok(false);
                }
                let reader =
                    guarded(|| self.file.get_row_group(self.next_group)?.get_column_reader(self.index));
                self.group = Some(reader.map_err(|error| self.failed(&error))?);
                self.next_group += 1;
            }
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let read = match &mut self.group {
                Some(ColumnReader::ByteArrayColumnReader(reader)) => {
                    guarded(|| reader.read_records(ROWS, Some(&mut levels), None, &mut values))
                }
                _ => Err(ParquetError::General("the column changes its type".into())),
            };
            let (rows, ..) = read.map_err(|error| self.failed(&error))?;
            if rows == 0 {
                self.group = None;
                continue;
            }
            let mut values = values.into_iter();
            if self.level == 0 {
                self.read.extend(values.map(Some));
            } else {
                let level = self.level;
                self.read.extend(levels.iter().map(|&l| if l == level { values.next() } else { None }));
            }
            return Ok(true);
        }
    }
}

impl Documents for Table {
    fn read(&mut self) -> Result<Option<Record>> {
        if self.read.is_empty() && !self.fill()? {
            return Ok(None);
        }
        let Some(value) = self.read.pop_front() else { return Ok(None) };
        self.row += 1;
        let wrong = match &value {
            None => "is null, not a text".to_string(),
            Some(bytes) => match std::str::from_utf8(bytes.data()) {
                Ok(text) => return Ok(Some(Record::Document(text.into()))),
                Err(error) => format!("is not UTF-8 (byte {} of it)", error.valid_up_to()),
            },
        };
        let message = format!("row {}: `{}` {wrong}", self.row, self.column);
        Ok(Some(Record::Broken(Error::file(&self.path, message))))
    }

    fn skip_to(&mut self, rows: u64) -> Result<()> {
        // Skip whole row groups without reading them.
        while self.row < rows {
            let groups = self.file.metadata().row_groups();
            let count = groups.get(self.next_group).map_or(0, |group| group.num_rows().max(0) as u64);
            if self.group.is_none() && self.read.is_empty() && count > 0 && count <= rows - self.row {
                self.next_group += 1;
                self.row += count;
                continue;
            }
            if self.read.is_empty() && !self.fill()? {
                let message = format!("has {} rows, but {rows} were read before; it has changed", self.row);
                return Err(Error::file(&self.path, message));
            }
            let count = (self.read.len() as u64).min(rows - self.row);
            self.read.drain(..count as usize);
            self.row += count;
        }
        Ok(())
    }

    fn place(&self) -> u64 {
        self.row
    }

    fn bytes(&self) -> u64 {
        (self.size as f64 * self.row as f64 / self.rows.max(1) as f64) as u64
    }
}
